"""How a model is sharded over ranks: names and shapes of the tensors in each rank's file.

Layers and experts are numbered from 0 on every rank. A whole model, and the mapping to Hugging
Face, number them globally:

    decoder.layers.<in the stage>                     decoder.layers.<in the model>
    mtp.layers.I.mtp_model_layer.                     mtp.layers.I.transformer_layer.
    mlp.experts.local_experts.<on the rank>.          mlp.experts.local_experts.<of the layer>.
    mlp.experts.linear_fc1.weight<on the rank>        the same (TransformerEngine's grouped GEMM)

Megatron's former ``GroupedMLP`` had two parameters for all E experts of a rank, transposed:

    mlp.experts.weight1   [hidden, E * 2 * I]   ->  [E, hidden, 2 * I], columns [gate, up]
    mlp.experts.weight2   [E * I, hidden]       ->  [E, I, hidden]

where I is the rank's share of an expert's width. Each expert is one block of consecutive bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from absorbed_mla.checkpoint.names import KV_DOWN, Q_DOWN, QKV_DOWN
from checkpoint_conversion.formats.legacy_ranks import Sizes
from checkpoint_conversion.formats.pt_file import StoredTensor
from checkpoint_conversion.layouts import (
    VOCABULARY,
    MegatronLayout,
    laid_out_tensors,
    tensor_parallel_rule,
    with_padding,
)
from checkpoint_conversion.lazy_tensor import LazyTensor, concat, zeros
from checkpoint_conversion.mapping import megatron_shapes
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.transforms import ROWS, Rule

EMBEDDING, OUTPUT = VOCABULARY
FINAL_NORM = "decoder.final_layernorm.weight"
Shape = tuple[int, ...]
_DECODER_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d{1,2})\.")
_MTP_INNER = re.compile(r"(mtp\.layers\.\d+\.)(?:mtp_model_layer|transformer_layer)\.")
_SEQUENTIAL = re.compile(r"(.*mlp\.experts\.)local_experts\.(\d+)\.(linear_fc[12])\.weight")
_GROUPED = re.compile(r"(.*mlp\.experts\.)(linear_fc[12])\.weight(\d+)")
_GROUPED_MLP = re.compile(r"(.*mlp\.experts\.)weight([12])")


def layer_count(names: Iterable[str]) -> int:
    """How many decoder layers a pipeline stage has, by its parameter names."""
    return _count(_DECODER_LAYER, names)


def mtp_layer_count(names: Iterable[str]) -> int:
    """How many MTP layers a pipeline stage has, by its parameter names."""
    return _count(_MTP_LAYER, names)


def decoder_layer(name: str) -> int | None:
    """The decoder layer that a tensor belongs to; None if it belongs to none."""
    match = _DECODER_LAYER.match(name)
    return None if match is None else int(match[1])


def expert_number(name: str) -> int | None:
    """The routed expert that a tensor belongs to, in the mapping's naming; None if to none."""
    match = _SEQUENTIAL.fullmatch(name)
    return None if match is None else int(match[2])


def experts_kind(names: Iterable[str]) -> str:
    """Which Megatron module the names of the routed experts come from."""
    for name in names:
        if _GROUPED.fullmatch(name):
            return "grouped"
        if _SEQUENTIAL.fullmatch(name):
            return "sequential"
    return "GroupedMLP"


def name_on_rank(name: str, first_layer: int, first_expert: int) -> str:
    """The local name of a tensor, on a rank whose first layer and expert are given.

    Args:
        name: In the whole model.
        first_layer: Global number of the first decoder layer of the rank's stage.
        first_expert: Global number of the rank's first expert.
    """
    layer = decoder_layer(name)
    if layer is not None:
        name = _DECODER_LAYER.sub(f"decoder.layers.{layer - first_layer}.", name, count=1)
    match = _SEQUENTIAL.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}local_experts.{int(match[2]) - first_expert}.{match[3]}.weight"


def as_mapped(name: str) -> str:
    """The mapping's name for a tensor inside an MTP layer, or of an expert of a grouped module."""
    name = _MTP_INNER.sub(r"\1transformer_layer.", name)
    match = _GROUPED.fullmatch(name)
    return name if match is None else f"{match[1]}local_experts.{match[3]}.{match[2]}.weight"


def is_grouped_mlp(name: str) -> bool:
    """Whether a tensor is a ``GroupedMLP`` parameter, which holds all experts of a rank."""
    return _GROUPED_MLP.fullmatch(name) is not None


def split_grouped_mlp(
    name: str, stored: StoredTensor, leaf: str, experts: int, hidden: int
) -> dict[str, LazyTensor] | None:
    """The experts in a ``GroupedMLP`` parameter, under the names of sequential experts.

    Args:
        name: Of the parameter.
        stored: The parameter.
        leaf: Name of the stored tensor, for the leaves of the result.
        experts: Number of experts on the rank.
        hidden: The model's hidden size.

    Returns:
        None if the parameter's shape does not fit.
    """
    match = _GROUPED_MLP.fullmatch(name)
    assert match is not None
    first = match[2] == "1"
    per_expert = math.prod(stored.shape) // max(1, experts * hidden)
    expected = (hidden, experts * per_expert) if first else (experts * per_expert, hidden)
    if stored.shape != expected or not per_expert or not stored.is_contiguous:
        return None
    block = (hidden, per_expert) if first else (per_expert, hidden)
    lazy = stored.view(experts, *block).lazy(leaf)
    return {
        f"{match[1]}local_experts.{expert}.linear_fc{match[2]}.weight": lazy.narrow(
            0, expert, 1
        ).map(lambda values: values[0].t().contiguous(), shape=block[::-1])
        for expert in range(experts)
    }


def _count(pattern: re.Pattern, names: Iterable[str]) -> int:
    return max((int(match[1]) + 1 for match in map(pattern.match, names) if match), default=0)


class StackedRows(Rule):
    """Several weights stacked along the rows, each of them split over the TP ranks.

    Args:
        rows: Number of rows of each weight.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = list(rows)

    def shard(self, tensor: LazyTensor, size: int) -> list[LazyTensor]:
        """Per rank: its rows of the first weight, then of the next."""
        pieces = [part.chunk(size) for part in tensor.split(self.rows)]
        return [concat(own) for own in zip(*pieces)]

    def merge(self, tensors: Sequence[LazyTensor]) -> LazyTensor:
        """All of the first weight, then all of the next."""
        own = [rows // len(tensors) for rows in self.rows]
        return concat([concat(parts) for parts in zip(*(t.split(own) for t in tensors))])

    def divides(self, shape: Shape, size: int) -> bool:
        """Whether each weight's rows are a multiple of ``size``."""
        return all(rows % size == 0 for rows in self.rows)


@dataclass(frozen=True)
class Share:
    """What a rank's file holds of one tensor of the model.

    Attributes:
        whole: Name of the tensor in the whole model.
        shape: Shape of the rank's share.
        copy: Whether the first pipeline stage has the tensor, too.
    """

    whole: str
    shape: Shape
    copy: bool = False


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How one model is distributed over a grid of ranks.

    Attributes:
        config: The model's dimensions.
        layout: Layout of the tensors (fused norms, combined projections).
        sizes: Sizes of the grid of ranks.
        stages: The decoder layers of each pipeline stage.
        mtp_stage: The pipeline stage of the MTP layers, if there are any.
        down_projection: ``"duplicated"`` (TransformerEngine) or ``"column-parallel"`` (local
            layers).
        vocab_rows: Rows of embedding and output layer, padding included.
    """

    config: ModelConfig
    layout: MegatronLayout
    sizes: Sizes
    stages: Sequence[range]
    mtp_stage: int
    down_projection: str
    vocab_rows: int

    def rule(self, whole: str) -> Rule:
        """How tensor-parallel ranks split a tensor of the model."""
        if self.down_projection == "column-parallel":
            if whole.endswith((f".{Q_DOWN}", f".{KV_DOWN}")):
                return ROWS
            if whole.endswith(f".{QKV_DOWN}"):
                latent = self.config.kv_lora_rank + self.config.qk_rope_head_dim
                return StackedRows([self.config.q_lora_rank or 0, latent])
        rule = tensor_parallel_rule(whole)
        assert rule is not None, whole
        return rule

    def describe(self, experts: str, iteration: int | None) -> dict[str, object]:
        """The entries of :attr:`Checkpoint.layout`.

        Args:
            experts: Which Megatron module the experts' names come from.
            iteration: Of the checkpoint; None if it does not say.
        """
        result: dict[str, object] = self.layout.describe()
        if self.config.num_experts:
            result["experts"] = experts
        result["tensor_parallel"] = self.sizes.tensor
        result["pipeline_parallel"] = self.sizes.pipeline
        if self.sizes.expert > 1:
            result["expert_parallel"] = self.sizes.expert
        if self.sizes.tensor > 1:
            result["down_projection"] = self.down_projection
        if iteration is not None:
            result["iteration"] = iteration
        return result

    def indivisible(self) -> list[str]:
        """What the tensor-parallel ranks cannot split equally; one line each."""
        size, heads = self.sizes.tensor, self.config.num_attention_heads
        problems = [f"{heads} attention heads"] if heads % size else []
        return problems + [
            f"{name} of shape {shape}"
            for name, shape in self._whole_shapes.items()
            if not self.rule(name).divides(shape, size)
        ]

    def shares(self, stage: int, expert_rank: int = 0) -> dict[str, Share]:
        """The tensors that the files of a stage's ranks must hold, by their local names."""
        each = self.config.num_experts // self.sizes.expert
        first_layer, first_expert = self.stages[stage].start, expert_rank * each
        own_experts = range(first_expert, first_expert + each)
        result = {}
        for whole in self._names_by_stage[stage]:
            expert = expert_number(whole)
            if expert is None or expert in own_experts:
                name = name_on_rank(whole, first_layer, first_expert)
                result[name] = Share(whole, self._share_shapes[whole])
        return result | self._copies(stage)

    def _copies(self, stage: int) -> dict[str, Share]:
        """Copies of the first stage's embedding: for MTP layers, and as a tied output layer."""
        names = []
        if self.config.mtp_layers and stage == self.mtp_stage:
            names.append(EMBEDDING)
        if self.config.tied_embeddings and stage == len(self.stages) - 1:
            names.append(OUTPUT)
        share = Share(EMBEDDING, self._share_shapes[EMBEDDING], copy=True)
        return dict.fromkeys(names, share) if stage > 0 else {}

    @cached_property
    def _whole_shapes(self) -> Mapping[str, Shape]:
        shapes = megatron_shapes(self.config).items()
        tensors = {name: zeros(shape, torch.float32) for name, shape in shapes}
        padded = with_padding(tensors, self.vocab_rows)
        laid_out = laid_out_tensors(padded, self.layout, self.config)
        return {name: tensor.shape for name, tensor in laid_out.items()}

    @cached_property
    def _share_shapes(self) -> Mapping[str, Shape]:
        return {
            name: self.rule(name).shard(zeros(shape, torch.float32), self.sizes.tensor)[0].shape
            for name, shape in self._whole_shapes.items()
        }

    @cached_property
    def _names_by_stage(self) -> list[list[str]]:
        result: list[list[str]] = [[] for _ in self.stages]
        stage_of = {layer: stage for stage, layers in enumerate(self.stages) for layer in layers}
        last_layer = stage_of[self.config.num_layers - 1]
        for name in self._whole_shapes:
            layer = decoder_layer(name)
            if layer is not None:
                stage = stage_of[layer]
            elif name.startswith("mtp."):
                stage = self.mtp_stage
            elif name == FINAL_NORM and self.config.mtp_layers:
                stage = last_layer
            else:
                stage = 0 if name == EMBEDDING else len(self.stages) - 1
            result[stage].append(name)
        return result
