"""RMSNorm on GPUs, one row at a time, for this package's norms and TransformerEngine's.

Megatron's (0.19.2) multiplies by the weight once too often in the input's gradient, and with
``zero_centered_gamma`` forgets to add 1 to the weight in forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from absorbed_mla.batch_invariant import megatron_operators
from absorbed_mla.batch_invariant.products import DTYPES
from absorbed_mla.once_differentiable import once_differentiable


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, dtype: torch.dtype
) -> Tensor:
    """RMSNorm in fp32 over the last dim, with first derivatives.

    Args:
        x: [..., width], bf16, fp16 or fp32.
        weight: [width].
        eps: Added to the mean square.
        zero_centered: Whether 1 is added to the weight.
        dtype: Of the result.
    """
    return _RMSNorm.apply(x, weight, eps, zero_centered, dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps, zero_centered, dtype) -> Tensor:
        from absorbed_mla.kernels.invariant.rms_norm import rms_norm_forward

        result, scale = rms_norm_forward(_rows(x), weight, eps, zero_centered, dtype)
        ctx.save_for_backward(x, weight, scale)
        ctx.zero_centered = zero_centered
        return result.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        from absorbed_mla.kernels.invariant.rms_norm import rms_norm_backward

        x, weight, scale = ctx.saved_tensors
        x_grad, weight_grad = rms_norm_backward(
            _rows(grad).contiguous(), _rows(x).contiguous(), weight, scale, ctx.zero_centered
        )
        return x_grad.view(x.shape), weight_grad, None, None, None


class TERMSNorm:
    """In place of the autograd function that Megatron gives TransformerEngine's RMSNorm."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool) -> Tensor:
        """The norm of ``x`` [..., width], in its dtype."""
        return rms_norm(x, weight, eps, zero_centered_gamma, x.dtype)


def apply_normalization(
    inputmat: Tensor,
    ln_out: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor | None,
    eps: float,
    output_quantizer: Any,
    output_dtype: torch.dtype,
    normalization: str,
    *margin_and_zero_centered: Any,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The norm inside of TransformerEngine's fused layers, with its arguments.

    Returns:
        The result, None, and 1 / root mean square of each row in fp32, from which
        TransformerEngine computes the gradients; what is no RMSNorm of bf16, fp16 or fp32 comes
        from TransformerEngine.
    """
    own = normalization == "RMSNorm" and output_quantizer is None and ln_bias is None
    if not own or inputmat.dtype not in DTYPES:
        return megatron_operators.megatrons(megatron_operators.megatron_te_normalization)(
            *(inputmat, ln_out, ln_weight, ln_bias, eps, output_quantizer, output_dtype),
            *(normalization, *margin_and_zero_centered),
        )
    from absorbed_mla.kernels.invariant.rms_norm import rms_norm_forward

    dtype = output_dtype if ln_out is None else ln_out.dtype
    zero_centered = bool(margin_and_zero_centered[1])
    result, scale = rms_norm_forward(_rows(inputmat), ln_weight, eps, zero_centered, dtype)
    result = result.view(inputmat.shape)
    return (result if ln_out is None else ln_out.copy_(result)), None, scale


def _rows(x: Tensor) -> Tensor:
    """[rows, width], the last axis contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
