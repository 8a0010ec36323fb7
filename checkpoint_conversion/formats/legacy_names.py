"""Parameter names in one rank's file, where layers and experts are numbered from 0 on every rank.

A whole model, and the mapping to Hugging Face, number them globally:

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
from collections.abc import Iterable

from checkpoint_conversion.formats.pt_file import StoredTensor
from checkpoint_conversion.lazy_tensor import LazyTensor

EXTRA_STATE = "_extra_state"
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
