"""Megatron's router of experts, for packs with padding."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor


class PackRouter(TopKRouter):
    """Balances experts as if a pack had no padding.

    Megatron leaves padding out of the balancing loss of each rank, but then weights it by the
    number of real tokens of that rank, or (0.19) of all ranks: the first differs among ranks, the
    second counts them too often. The gradient of the sum needs the mean.
    """

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As Megatron's: logits [s, b, experts], padding [s, b]; both results [s * b, experts]."""
        self._mean_tokens = None
        if padding_mask is not None:
            tokens = (~padding_mask).sum()
            dist.all_reduce(tokens, group=self.tp_cp_group)
            self._mean_tokens = tokens / self.tp_cp_group.size()
        return super().routing(logits, padding_mask)

    def attach_and_log_load_balancing_loss(
        self, activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group, **options
    ):
        """As Megatron's, weighted by the mean number of real tokens on a rank."""
        if self._mean_tokens is not None:
            options["valid_token_count"] = self._mean_tokens
        return super().attach_and_log_load_balancing_loss(
            activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group, **options
        )

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        # Megatron 0.19 combines [tokens, experts] with [tokens].
        mask = None if padding_mask is None else padding_mask[:, None]
        super()._apply_expert_bias(routing_map, padding_mask=mask)


def use_pack_router(block: TransformerBlockSubmodules) -> None:
    """Put :class:`PackRouter` into the MoE layers of a block spec."""
    for layer in block.layer_specs:
        submodules = getattr(layer.submodules.mlp, "keywords", {}).get("submodules")
        if isinstance(submodules, MoESubmodules):
            submodules.router = PackRouter
