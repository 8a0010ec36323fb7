"""Grouped experts: weights of all local experts in one tensor, under their names as before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from absorbed_mla.batch_invariant import is_enabled
from absorbed_mla.serving.experts.permuted_tokens import PermutedTokens
from absorbed_mla.serving.experts.product import grouped_product

# Field of the config -> what this module computes.
_COMPUTED: dict[str, tuple] = {
    "gated_linear_unit": (True,),
    "add_bias_linear": (False,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0,),
    "use_te_activation_func": (False,),
    "moe_apply_probs_on_input": (False,),
    "fp8": (None, False),
    "fp4": (None, False),
}


class GroupedExperts(SequentialMLP):
    """Megatron's ``SequentialMLP``, with the same parameters, that computes all experts together.

    Each expert's parameters are views of two tensors [experts, ...], so loading, exporting and
    sharing weights, and setting them in place, are those of ``SequentialMLP``. For inference.

    Args:
        num_local_experts: This rank's.
        config: Of the model.
        host: The other arguments of Megatron's class.

    Raises:
        ValueError: If the config has experts that are no SwiGLU without biases, or the like.
    """

    def __init__(self, num_local_experts: int, config: Any, *host: Any, **more: Any) -> None:
        for name, accepted in _COMPUTED.items():
            value = getattr(config, name, accepted[0])
            if value not in accepted:
                raise ValueError(f"grouped experts need {name} {accepted[0]}, got {value!r}")
        super().__init__(num_local_experts, config, *host, **more)
        self._weights: tuple[Tensor, Tensor] | None = None
        # Memory that a checkpoint is read into is not worth a copy of gigabytes.
        self._stack(with_values=config.perform_initialization)

    def forward(self, tokens: Tensor, rows: PermutedTokens, probs: Tensor) -> tuple[Tensor, None]:
        """Of rows that are sorted by expert.

        Args:
            tokens: [T, H], which the rows are of.
            rows: R of them.
            probs: [T, K], what the results of a token's choices are multiplied by.

        Returns:
            [R, H], undefined behind the last end, and no bias.
        """
        # Somebody may have given the parameters other memory since.
        if not self._is_stacked(whole=False):
            self._stack()
        assert self._weights is not None
        into, out_of = self._weights
        inner = grouped_product(tokens, into, rows.ends, rows.tokens)
        inner = self._activated(inner, rows, probs)
        return grouped_product(inner, out_of, rows.ends, row_parallel=True), None

    def _activated(self, gate_and_up: Tensor, rows: PermutedTokens, probs: Tensor) -> Tensor:
        """[R, 2 F], which may be overwritten, to [R, F], times the probabilities."""
        activation = self.config.activation_func
        parity = is_enabled(gate_and_up.device)
        # The kernel multiplies in fp32, PyTorch by fp64 probabilities in fp64.
        fused = activation is F.silu and not (parity and probs.dtype is torch.float64)
        if gate_and_up.is_cuda and fused:
            # Imported here, because machines without a GPU need not have Triton.
            from absorbed_mla.kernels.moe.swiglu import swiglu

            return swiglu(
                gate_and_up,
                probs.contiguous(),
                rows.choices,
                rows.ends,
                rounds_each_step=parity,
            )
        gate, up = gate_and_up.chunk(2, -1)
        # In place, and each step rounded as Megatron's, whose offset of zero makes 0 of -0.
        return activation(gate).mul_(up.add_(0.0)).mul_(rows.choices_of(probs).unsqueeze(-1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedExperts:
        """Move or cast, as ``to()`` does."""
        super()._apply(fn, recurse)
        if not self._is_stacked():
            self._stack()
        return self

    def _of_experts(self) -> tuple[Sequence[nn.Parameter], Sequence[nn.Parameter]]:
        return (
            [expert.linear_fc1.weight for expert in self.local_experts],
            [expert.linear_fc2.weight for expert in self.local_experts],
        )

    def _is_stacked(self, *, whole: bool = True) -> bool:
        """Whether the parameters are views of the stacked weights.

        Args:
            whole: Ask all of them, not the first expert's alone, which is quick.
        """
        if self._weights is None:
            return False
        for stacked, parameters in zip(self._weights, self._of_experts()):
            for view, parameter in zip(stacked, parameters if whole else parameters[:1]):
                if parameter.data_ptr() != view.data_ptr() or parameter.dtype != view.dtype:
                    return False
        return True

    # Leaving inference mode would switch gradients on.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _stack(self, *, with_values: bool = True) -> None:
        """Give the parameters memory one behind the other, with their values or none."""
        self._weights = None
        into, out_of = (_stacked(found, with_values) for found in self._of_experts())
        self._weights = into, out_of


def _stacked(parameters: Sequence[nn.Parameter], with_values: bool) -> Tensor:
    first = parameters[0]
    stacked = first.new_empty(len(parameters), *first.shape)
    for parameter, view in zip(parameters, stacked):
        if with_values:
            view.copy_(parameter)
        parameter.data = view
    return stacked
