"""Megatron's MoE layer with grouped experts, and specs of layers that have it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, TypeVar

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec

from absorbed_mla.batch_invariant.requirements import declare_experts_in_order
from absorbed_mla.deepseek_router import DeepSeekRouter
from absorbed_mla.moe_layer import NormedMoE
from absorbed_mla.serving.experts.dispatcher import GroupedDispatcher
from absorbed_mla.serving.experts.experts import GroupedExperts
from absorbed_mla.serving.experts.router import TopKIndexRouter

Block = TypeVar("Block")
# Why ranks that share experts do not have the bits of Megatron's.
SEVERAL_RANKS = "ranks that share experts add their sums in another order than Megatron's"
# Fields of the config that must be False in parity mode: Megatron's experts have other bits.
_FUSIONS = ("moe_permute_fusion", "moe_router_fusion", "bias_activation_fusion")


class GroupedMoE(NormedMoE):
    """Megatron's mixture of experts, with :class:`GroupedExperts` and what belongs to them.

    Args:
        config: Of the model.
        pg_collection: Process groups; None takes Megatron's.
        parity: Whether this is a layer of a model in parity mode (``docs/parity.md``). The process
            must be in the mode, too: its operators, and those of grouped experts, then have the
            bits of Megatron's ``SequentialMLP``.
        host: The other arguments of Megatron's layer.

    Raises:
        ValueError: If shared experts are to overlap an exchange, or data-parallel ranks share
            experts; in parity mode also if any ranks do, or Megatron would fuse operators.
    """

    def __init__(
        self,
        config: Any,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        parity: bool = False,
        **host: Any,
    ) -> None:
        if config.moe_shared_expert_overlap:
            raise ValueError("moe_shared_expert_overlap must be False for grouped experts")
        groups = pg_collection or get_default_pg_collection()
        if groups.tp_ep.size() not in (1, groups.tp.size()):
            raise ValueError(
                "expert_model_parallel_size x expert_tensor_parallel_size must be 1 or the "
                f"{groups.tp.size()} tensor-parallel ranks for grouped experts, got "
                f"{groups.tp_ep.size()}"
            )
        if parity or getattr(config, "batch_invariant_mode", False):
            _require_same_bits(config, groups)
        super().__init__(config, pg_collection=groups, **host)
        declare_experts_in_order(config)
        self.token_dispatcher = GroupedDispatcher(
            self.num_local_experts, self.local_expert_indices, config, groups
        )


def _require_same_bits(config: Any, groups: ProcessGroupCollection) -> None:
    """Refuse what would have other bits than Megatron's experts in parity mode."""
    ranks = groups.tp_ep.size()
    if ranks > 1:
        raise ValueError(
            f"grouped experts need one rank in parity mode, got {ranks}: {SEVERAL_RANKS}"
        )
    for name in _FUSIONS:
        if getattr(config, name, False):
            raise ValueError(f"grouped experts need {name} False in parity mode, got True")


def group_experts(block: Block, *, parity: bool = False) -> Block:
    """The spec of a decoder or MTP block whose experts are grouped, for inference.

    Args:
        block: With the field ``layer_specs``; experts are Megatron's ``SequentialMLP``.
        parity: See :class:`GroupedMoE`.
    """
    for i, layer in enumerate(block.layer_specs):
        block.layer_specs[i] = _grouped(layer, parity)
    return block


def _grouped(layer: ModuleSpec, parity: bool) -> ModuleSpec:
    parts = layer.submodules
    if hasattr(parts, "mtp_model_layer"):
        inner = _grouped(parts.mtp_model_layer, parity)
        return replace(layer, submodules=replace(parts, mtp_model_layer=inner))
    if not isinstance(_submodules(parts.mlp), MoESubmodules):
        return layer
    return replace(layer, submodules=replace(parts, mlp=_grouped_mlp(parts.mlp, parity)))


def _grouped_mlp(mlp: functools.partial, parity: bool) -> functools.partial:
    submodules = _submodules(mlp)
    experts = submodules.experts
    assert experts.func is SequentialMLP, submodules
    submodules = replace(
        submodules,
        experts=functools.partial(GroupedExperts, **experts.keywords),
        router=_choosing_router(submodules.router),
    )
    # A layer of another kind takes its dispatcher from the experts that it got.
    keywords = {**mlp.keywords, "submodules": submodules}
    if mlp.func not in (MoELayer, NormedMoE):
        return functools.partial(mlp.func, **keywords)
    return functools.partial(GroupedMoE, parity=parity, **keywords)


def _choosing_router(router: Any) -> Any:
    """What builds the router of grouped experts that chooses like another."""
    if router is TopKRouter:
        return TopKIndexRouter
    assert router.func is DeepSeekRouter, router
    return functools.partial(TopKIndexRouter, **router.keywords)


def _submodules(mlp: Any) -> Any:
    return getattr(mlp, "keywords", {}).get("submodules")
