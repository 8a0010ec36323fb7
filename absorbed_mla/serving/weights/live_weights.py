"""The weights of a live model, this rank's share of each, from the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.lora.model import IN_NAMES
from absorbed_mla.serving.data_parallel_attention.exchange import TokenExchange
from absorbed_mla.serving.data_parallel_attention.model import exchange_of
from absorbed_mla.serving.weights.global_names import global_parameter_names
from checkpoint_conversion.formats.legacy import as_mapped
from checkpoint_conversion.layouts import (
    MegatronLayout,
    laid_out_tensors,
    tensor_parallel_rule,
    with_padding,
)
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession, concat
from checkpoint_conversion.mapping import to_megatron
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.part_runner import MemoryBudget, run_parts

# Tensors that are read side by side, unless together they take more bytes of the host's memory.
_THREADS, _MOST_BYTES = 4, 2**30


def set_weights(model: GPTModel, config: ModelConfig, tensors: dict[str, LazyTensor]) -> None:
    """Set every weight of this rank's model.

    Args:
        model: Its weights are set in place.
        config: Of the whole model.
        tensors: Under Hugging Face's names.

    Raises:
        CheckpointError: If the tensors do not fit the config.
    """
    parts = [_Part(*pair) for pair in shares(model, config, tensors)]
    run_parts(parts, _set, MemoryBudget(_MOST_BYTES), _THREADS)


class _Part(NamedTuple):
    weight: Tensor
    share: LazyTensor

    @property
    def peak(self) -> int:
        return self.share.peak


@torch.no_grad()
def _set(part: _Part) -> None:
    with ReadSession() as session:
        part.share.copy_to(part.weight, session)


def own_weights(model: GPTModel) -> dict[str, Tensor]:
    """This rank's weights, those of adapters excepted, under their names in the whole model."""
    state = global_parameter_names(model, model.state_dict()).items()
    # Live MTP layers have another name than those of checkpoints.
    return {
        as_mapped(name): v
        for name, v in state
        if not name.endswith("_extra_state") and IN_NAMES not in name
    }


def shares(
    model: GPTModel, config: ModelConfig, tensors: Mapping[str, LazyTensor]
) -> list[tuple[Tensor, LazyTensor]]:
    """Each weight of this rank, and its new values; collective over the model's ranks.

    Args:
        model: Of this rank.
        config: Of the whole model.
        tensors: Under Hugging Face's names.

    Raises:
        CheckpointError: On every rank, if the tensors do not fit the config.
    """
    own = own_weights(model)
    mapped = to_megatron(tensors, config)
    if config.tied_embeddings:
        # The last of several stages has a copy under this name.
        mapped["output_layer.weight"] = mapped["embedding.word_embeddings.weight"]
    exchange = exchange_of(model)
    group = parallel_state.get_model_parallel_group() if exchange is None else exchange.group
    whole = _in_layout_of(own, mapped, config, group)
    whole = with_padding(whole, model.vocab_size)
    return [
        (weight, _share(name, whole[name], tuple(weight.shape), *_place(name, exchange)))
        for name, weight in own.items()
    ]


def _in_layout_of(
    own: Collection[str],
    tensors: dict[str, LazyTensor],
    config: ModelConfig,
    group: dist.ProcessGroup,
) -> dict[str, LazyTensor]:
    """Whole tensors under the names of a live model.

    Args:
        own: Names of the model's weights.
        tensors: All weights under Megatron's names, in the default layout.
        config: Of the model.
        group: Ranks that share the model.
    """
    choices = MegatronLayout.recognise(own).choices
    named: dict[str, LazyTensor] = {}
    # With TransformerEngine's layers, the norm of the MLP is fused and those of our attention not.
    for norms in ("separate", "fused"):
        named |= laid_out_tensors(tensors, MegatronLayout(**{**choices, "norms": norms}), config)
    found = {name: named[name] for name in own}
    used = frozenset[str]().union(*(tensor.leaves for tensor in found.values()))
    used = _of_all_ranks(used, group)
    unused = frozenset[str]().union(*(tensor.leaves for tensor in tensors.values())) - used
    assert not unused, f"the model has no place for {sorted(unused)}"
    return found


def _of_all_ranks(names: frozenset[str], group: dist.ProcessGroup) -> frozenset[str]:
    """Names on any rank of a group."""
    found: list[frozenset[str]] = [names] * group.size()
    if group.size() > 1:
        dist.all_gather_object(found, names, group=group)
    return frozenset[str]().union(*found)


def _place(name: str, exchange: TokenExchange | None) -> tuple[int, int]:
    """This rank's number among those that share a weight, and how many they are.

    With data-parallel attention, whose own weights are whole, it is that among those that divide
    the others.
    """
    if ".experts." in name:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    if exchange is not None:
        return exchange.rank, exchange.size
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _share(name: str, tensor: LazyTensor, shape: Sequence[int], rank: int, size: int) -> LazyTensor:
    """A rank's share, of ``shape``, of a whole tensor."""
    rule = tensor_parallel_rule(name)
    if tensor.shape == shape or rule is None:
        return tensor
    # Local layers cut down-projections by rows, TransformerEngine's do not cut them.
    dim = 0 if rule.dim is None else rule.dim
    whole = sum(rule.stacked)
    sizes = [tensor.shape[dim] * part // whole for part in rule.stacked]
    return concat([part.chunk(size, dim)[rank] for part in tensor.split(sizes, dim)], dim)
