"""Megatron's MoE router, corrected for packed sequences that contain padding or share prefixes.

Megatron's ``TopKRouter`` takes a ``padding_mask``, but then gives the load-balancing loss a wrong
weight and cannot update the expert bias. :class:`PackedRouter` repairs both; without a mask it does
what ``TopKRouter`` does. :func:`use_packed_router` puts it into a block spec. Inside of
:func:`counted_tokens` it counts a token as often as a pack without shared prefixes has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from absorbed_mla.dsa.checkpoint_scope import current_scope, scope_checkpoints
from absorbed_mla.megatron_names import EXPERT_BIAS, EXPERT_BIAS_OF_PACKS, ROUTER

# Values of moe_router_load_balancing_type that do not choose for each token alone.
OWN_CHOICE = {"sinkhorn", "quantile_balancing"}


class PackedRouter(TopKRouter):
    """Router whose load-balancing loss does not depend on padding.

    Megatron leaves padding out of each rank's balancing loss, then multiplies that loss by the
    number of real tokens of the rank, or (0.19) of all ranks of the tensor- and context-parallel
    group. The first differs between ranks, the second counts every token once per rank. The
    gradients of the ranks are summed, so the right factor is the mean over the group.

    Args:
        config: Of the model.
        args: The other arguments of Megatron's router.
        kwargs: The same, by name.

    Raises:
        ValueError: If experts have a bias, which this release of Megatron updates in another way.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        if config.moe_router_enable_expert_bias:
            EXPERT_BIAS_OF_PACKS.require({ROUTER: TopKRouter})
        super().__init__(config, *args, **kwargs)
        self._counts: Tensor | None = None

    def routing(
        self, logits: Tensor, padding_mask: Tensor | None = None, **host: Any
    ) -> tuple[Tensor, Tensor]:
        """Choose experts.

        Args:
            logits: [s, b, experts].
            padding_mask: Bool [s, b], True for padding; None if there is none.
            host: What else Megatron's takes; on its branch ``dev`` input ids.

        Returns:
            Probabilities and the routing map, both [s * b, experts].
        """
        self._mean_tokens = None
        counts = self._counts_of_forward()
        if counts is not None:
            # Megatron multiplies by the inverted mask; the inverse of ~n is n.
            padding_mask = ~tokens_of_rank(self.config, counts).to(logits.device)[:, None]
        if padding_mask is not None:
            tokens = (~padding_mask).sum()
            dist.all_reduce(tokens, group=self.tp_cp_group)
            self._mean_tokens = tokens / self.tp_cp_group.size()
        return super().routing(logits, padding_mask, **host)

    def _counts_of_forward(self) -> Tensor | None:
        """Of the forward that runs, or is recomputed."""
        scope = current_scope()
        return self._counts if scope is None else scope.kept.setdefault(self, self._counts)

    def attach_and_log_load_balancing_loss(
        self, activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group, **options
    ):
        """As Megatron's, with the loss weighted by the mean number of real tokens of a rank."""
        if self._mean_tokens is not None:
            options["valid_token_count"] = self._mean_tokens
        return super().attach_and_log_load_balancing_loss(
            activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group, **options
        )


def _apply_expert_bias(
    router: TopKRouter, routing_map: Tensor, padding_mask: Tensor | None = None
) -> None:
    # Not by Megatron, whose 0.19 combines a map [tokens, experts] with a mask [tokens].
    if padding_mask is not None:
        routing_map = routing_map * ~padding_mask[:, None]
    EXPERT_BIAS.of(TopKRouter)(router, routing_map)


EXPERT_BIAS.replace(PackedRouter, _apply_expert_bias)


@contextmanager
def counted_tokens(model: nn.Module, counts: Tensor) -> Iterator[None]:
    """Count tokens several times in what balances experts, in the forwards inside of the block.

    Backward may follow after the block; recomputed layers get what their forward had.

    Args:
        model: Also inside of wrappers.
        counts: int64 [S / cp], of the tokens of this context-parallel rank; 0 for padding.

    Raises:
        ValueError: If the model balances experts in a way that has no place for the counts.
    """
    routers = [one for one in model.modules() if isinstance(one, TopKRouter)]
    for router in routers:
        require_countable(router)
    balanced = [one for one in routers if isinstance(one, PackedRouter)]
    scope_checkpoints()
    try:
        for router in balanced:
            router._counts = counts
        yield
    finally:
        for router in balanced:
            router._counts = None


def require_countable(router: TopKRouter) -> None:
    """Check that :func:`counted_tokens` makes a router do what it does without shared prefixes.

    Raises:
        ValueError: Naming the field of the config that does not go with it.
    """
    config = router.config
    kinds = config.moe_router_load_balancing_type
    for name, accepted, why in (
        ("moe_expert_capacity_factor", None, "copies of a token may be dropped one by one"),
        ("moe_input_jitter_eps", None, "copies of a token have noise of their own"),
        ("moe_router_force_load_balancing", False, "copies of a token go to other experts"),
        ("cuda_graph_impl", "none", "a graph repeats what it has captured"),
    ):
        if getattr(config, name) != accepted:
            raise ValueError(
                f"experts of tokens in shared prefixes need {name}={accepted!r}, got "
                f"{getattr(config, name)!r}: {why}"
            )
    if OWN_CHOICE & {*(kinds if isinstance(kinds, list) else [kinds])}:
        raise ValueError(
            "experts of tokens in shared prefixes need a moe_router_load_balancing_type that "
            f"chooses for each token alone, got {kinds!r}"
        )
    z_loss = config.moe_z_loss_coeff is not None
    if z_loss and router.tp_cp_group.size() > 1 and not router.calculate_per_token_loss:
        raise ValueError(
            "moe_z_loss_coeff with shared prefixes needs calculate_per_token_loss=True over "
            f"{router.tp_cp_group.size()} tensor- and context-parallel ranks: Megatron weighs the "
            "ranks equally, which count different numbers of tokens"
        )
    counted = z_loss or router.enable_expert_bias or router.is_aux_loss_enabled()
    if counted and not isinstance(router, PackedRouter):
        raise ValueError(
            "experts that are balanced (moe_aux_loss_coeff, moe_z_loss_coeff, "
            "moe_router_enable_expert_bias) need PackedRouter with shared prefixes, got "
            f"{type(router).__name__}: put use_packed_router(spec) before the model"
        )


def tokens_of_rank(config: TransformerConfig, values: Tensor) -> Tensor:
    """Of a tensor-parallel rank its own tokens, under sequence parallelism.

    Args:
        config: Of the model.
        values: [S / cp, ...], of all of them.
    """
    size = config.tensor_model_parallel_size
    if not config.sequence_parallel or size == 1:
        return values
    return values.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]


def use_packed_router(
    block: TransformerBlockSubmodules | MultiTokenPredictionBlockSubmodules,
) -> None:
    """Make :class:`PackedRouter` the router of all MoE layers of a block spec, in place.

    Routers of another kind, such as ``DeepSeekRouter``, which is one, stay.
    """
    for layer in block.layer_specs:
        inner = getattr(layer.submodules, "mtp_model_layer", layer)
        submodules = getattr(inner.submodules.mlp, "keywords", {}).get("submodules")
        if isinstance(submodules, MoESubmodules) and submodules.router is TopKRouter:
            submodules.router = PackedRouter
