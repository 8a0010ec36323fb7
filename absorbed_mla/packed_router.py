"""Megatron's MoE router, corrected for packed sequences that contain padding.

Megatron's ``TopKRouter`` takes a ``padding_mask``, but then gives the load-balancing loss a wrong
weight and cannot update the expert bias. :class:`PackedRouter` repairs both; without a mask it does
what ``TopKRouter`` does. :func:`use_packed_router` puts it into a block spec.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from absorbed_mla.megatron_names import EXPERT_BIAS, EXPERT_BIAS_OF_PACKS, ROUTER


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
        if padding_mask is not None:
            tokens = (~padding_mask).sum()
            dist.all_reduce(tokens, group=self.tp_cp_group)
            self._mean_tokens = tokens / self.tp_cp_group.size()
        return super().routing(logits, padding_mask, **host)

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
    # Megatron 0.19 combines the routing map [tokens, experts] with a mask [tokens].
    mask = None if padding_mask is None else padding_mask[:, None]
    EXPERT_BIAS.of(TopKRouter)(router, routing_map, padding_mask=mask)


EXPERT_BIAS.replace(PackedRouter, _apply_expert_bias)


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
