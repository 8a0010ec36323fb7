"""RMSNorm on GPUs, one row at a time, for this package's norms and TransformerEngine's.

Megatron's (0.19.2) multiplies by the weight once too often in the input's gradient, and with
``zero_centered_gamma`` forgets to add 1 to the weight in forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from absorbed_mla.batch_invariant import megatron_operators, parts
from absorbed_mla.batch_invariant.parallel_linear import sum_over_tokens
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
    return _RMSNorm.apply(x, weight, eps, zero_centered, dtype, _group(weight))


def scaled(x: Tensor, weight: Tensor, parameter: nn.Parameter) -> Tensor:
    """``x`` [tokens, ..., width] times ``weight`` [width], made from ``parameter``, by parts."""
    return _Scaled.apply(x, weight, parts.token_group(parameter))


# The weight's gradient is summed over all tokens of a rank, not by parts of them.
_ALL_AT_ONCE = object()


def _group(weight: Tensor) -> Any:
    """The ranks that share the weight's tokens, or None, where its gradient is summed by parts."""
    return _ALL_AT_ONCE if parts.fixed.count is None else parts.token_group(weight)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors

        def summand(tokens: slice) -> Tensor:
            return (grad[tokens] * x[tokens]).flatten(0, -2).sum(0)

        return grad * weight, sum_over_tokens(summand, len(x), ctx.group), None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps, zero_centered, dtype, group) -> Tensor:
        from absorbed_mla.kernels.invariant.rms_norm import rms_norm_forward

        result, scale = rms_norm_forward(_rows(x), weight, eps, zero_centered, dtype)
        ctx.save_for_backward(x, weight, scale)
        ctx.zero_centered, ctx.group = zero_centered, group
        return result.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        from absorbed_mla.kernels.invariant.rms_norm import rms_norm_backward

        x, weight, scale = ctx.saved_tensors
        rows = _rows(grad).contiguous(), _rows(x).contiguous()
        x_grad, weight_grad = rms_norm_backward(*rows, weight, scale, ctx.zero_centered)
        if ctx.group is not _ALL_AT_ONCE:
            weight_grad = _weight_gradient(ctx, *rows, len(x)).to(weight.dtype)
        return x_grad.view(x.shape), weight_grad, None, None, None, None


def _weight_gradient(ctx, grad: Tensor, x: Tensor, tokens: int) -> Tensor:
    from absorbed_mla.kernels.invariant.rms_norm import rms_norm_backward

    _, weight, scale = ctx.saved_tensors
    batch, wide = len(x) // max(tokens, 1), weight.float()

    def summand(part: slice) -> Tensor:
        own = slice(part.start * batch, part.stop * batch)
        return rms_norm_backward(grad[own], x[own], wide, scale[own], ctx.zero_centered)[1]

    return sum_over_tokens(summand, tokens, ctx.group)


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
