"""Fused residual addition and RMSNorm in steps that are full CUDA graphs."""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from absorbed_mla.caching import this_run
from absorbed_mla.log_once import log_once
from absorbed_mla.norm import RMSNorm, few_rows, is_plain
from absorbed_mla.serving.megatron_engine.names import FUSED_RESIDUALS, LAYER, SUMS_OF_LAYERS

logger = logging.getLogger(__name__)


class NormedSum:
    """Takes the place of Megatron's bias-dropout-add, and makes what the norm behind it returns.

    The norm is asked as before. Where it is given the very tensor that was the sum, in the same run
    of a whole step, it returns what was made with that: the bits of a sum and a norm, which parity
    mode's norm has in any step.

    Args:
        norm: That takes the sum; its ``forward`` is replaced.
    """

    def __init__(self, norm: RMSNorm) -> None:
        self._norm = norm
        self._run: object | None = None
        self._made: tuple[Tensor, Tensor] | None = None
        self._forward = norm.forward
        norm.forward = self._normed  # type: ignore[method-assign]

    def __call__(self, training: bool, fused: bool) -> Any:
        """As Megatron's ``get_bias_dropout_add``."""
        add = get_bias_dropout_add(training, fused)

        def added(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float):
            x, bias = x_with_bias
            if bias is None and not training and self._is_fused(x, residual):
                return self._added(x, residual)
            return add(x_with_bias, residual, prob)

        return added

    def _added(self, x: Tensor, residual: Tensor) -> Tensor:
        # Imported here, because machines without a GPU need not have Triton.
        from absorbed_mla.kernels.added_norm import added_norm

        norm = self._norm
        self._run = this_run()
        self._made = added_norm(x, residual, norm.weight, norm.eps, norm.zero_centered)
        return self._made[0]

    def _is_fused(self, x: Tensor, residual: Tensor) -> bool:
        return (
            this_run() is not None
            and few_rows(x)
            # Megatron switches gradients on here.
            and not (x.requires_grad or residual.requires_grad)
            and x.dtype == residual.dtype == self._norm.weight.dtype
            and x.shape == residual.shape
            and x.is_contiguous()
            and residual.is_contiguous()
        )

    def _normed(self, x: Tensor) -> Tensor:
        made, self._made = self._made, None
        if made is not None and made[0] is x and self._run is this_run():
            return made[1]
        return self._forward(x)


def fuse_residuals(model: GPTModel) -> None:
    """Let the layers of a model that only generates add and normalise at once where they can."""
    layers, last = [*model.decoder.layers], model.decoder.final_layernorm
    for layer in layers:
        if missing := FUSED_RESIDUALS.missing({LAYER: layer}):
            log_once(logger, "layers add and normalise in two kernels", missing)
            return
    behind = [*(layer.input_layernorm for layer in layers[1:]), last]
    for layer, norm in zip(layers, behind):
        # Nothing but identities lies between.
        plain = isinstance(layer.cross_attention, IdentityOp)
        for name, follows in zip(SUMS_OF_LAYERS, (layer.pre_mlp_layernorm, norm)):
            taken = name.of(layer) is get_bias_dropout_add
            if plain and taken and _is_plain(follows):
                name.replace(layer, NormedSum(follows))


def _is_plain(norm: nn.Module | None) -> bool:
    return isinstance(norm, RMSNorm) and is_plain(norm, norm.weight)
