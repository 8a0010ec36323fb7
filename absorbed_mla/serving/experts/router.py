"""Megatron's router with top-k indices as its output, in place of a routing map."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from absorbed_mla.batch_invariant import is_enabled
from absorbed_mla.deepseek_router import normalises, require_choice, topk_routing
from absorbed_mla.options import AbsorbedMLAOptions

# Ways of balancing that choose by scores alone in inference.
_BY_SCORE = {"none", "aux_loss", "seq_aux_loss", "global_aux_loss"}


class TopKIndexRouter(TopKRouter):
    """Megatron's router for inference: the same choices and probabilities, as [T, K].

    Args:
        config: Of the model.
        options: Those of the router are read; None for Megatron's choice.
        host: Arguments of Megatron's class.

    Raises:
        ValueError: If ``moe_router_load_balancing_type`` chooses by more than scores, or the config
            does not go with the options.
    """

    def __init__(self, config, *, options: AbsorbedMLAOptions | None = None, **host) -> None:
        self.options = AbsorbedMLAOptions.coerce(options)
        require_choice(config, self.options)
        super().__init__(config, **host)
        kinds = self.routing_type if isinstance(self.routing_type, list) else [self.routing_type]
        if set(kinds) - _BY_SCORE:
            raise ValueError(
                f"grouped experts need a moe_router_load_balancing_type of {sorted(_BY_SCORE)}, "
                f"got {self.routing_type!r}"
            )

    def gating(self, input: Tensor) -> Tensor:
        """Logits [S, B, experts], or of few tokens on a GPU parts of them, [P, S, B, experts].

        PyTorch would copy weights and tokens to multiply them in fp32.
        """
        if _generates(input) and self._takes_parts(input):
            # Imported here, because machines without a GPU need not have Triton.
            from absorbed_mla.kernels.moe.logits import is_few, partial_logits

            x = input.flatten(0, -2)
            if is_few(len(x)):
                parts = partial_logits(x, self.weight)
                return parts.view(len(parts), *input.shape[:-1], -1)
        return super().gating(input)

    def routing(
        self, logits: Tensor, padding_mask: Tensor | None = None, **host: Any
    ) -> tuple[Tensor, Tensor]:
        """Choose experts, all of whose tokens they compute, whatever capacity Megatron sets.

        Args:
            logits: As :meth:`gating` returns them.
            padding_mask: For training; None.
            host: Of Megatron's branch ``dev``: input ids, which no model here routes by.

        Returns:
            Probabilities of the chosen experts and their numbers, both [S * B, K].

        Raises:
            ValueError: If the model is not in evaluation mode.
        """
        if self.training:
            raise ValueError("grouped experts are for inference: call model.eval() first")
        assert padding_mask is None, "for training"
        config, in_parts, logits = self.config, logits.dim() == 4, logits.flatten(-3, -2)
        of_group = self.options.moe_router_group_score_topk
        normalised = self.options.moe_router_norm_topk_prob
        if in_parts or (logits.is_cuda and self._is_one_pass()):
            # Imported here, because machines without a GPU need not have Triton.
            from absorbed_mla.kernels.moe.choice import choose_experts

            return choose_experts(
                logits,
                self.topk,
                softmax=self.score_function == "softmax",
                bias=self.expert_bias,
                groups=config.moe_router_num_groups,
                group_topk=config.moe_router_group_topk,
                group_score_topk=of_group,
                normalize=normalises(self.score_function, self.topk, normalised),
                scale=config.moe_router_topk_scaling_factor,
            )
        choose, own = topk_routing_with_score_function, {}
        if self.options.chooses_experts:
            choose = topk_routing
            own = {"group_score_topk": of_group, "norm_topk_prob": normalised}
        return choose(
            logits,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            router_replay=self.router_replay,
            dense_output=True,
            **own,
        )

    def _takes_parts(self, input: Tensor) -> bool:
        """Whether nothing but ``choose_experts`` looks at the logits, which are to be in fp32."""
        config = self.config
        return (
            config.moe_router_dtype == "fp32"
            and self.bias is None
            and input.dtype == self.weight.dtype != torch.float64
            and input.device == self.weight.device
            and not getattr(config, "moe_router_force_load_balancing", False)
            and getattr(config, "moe_router_force_biased", None) is None
            and self._is_one_pass()
        )

    def _is_one_pass(self) -> bool:
        """Whether the choice is one that ``choose_experts`` knows, and its bits are as good."""
        if self.router_replay is not None or is_enabled(self.weight.device):
            return False
        if self.score_function == "softmax":
            return self.config.moe_router_pre_softmax and self.expert_bias is None
        return self.score_function == "sigmoid"


def _generates(x: Tensor) -> bool:
    """Whether ``x`` is on a GPU and no gradient is wanted."""
    return x.is_cuda and not torch.is_grad_enabled()
