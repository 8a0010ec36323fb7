"""Kernels of RMSNorm, one row at a time: forward and gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.scratch import not_filled
from absorbed_mla.kernels.triton.common import interpreted, narrow, sum_of

# Programs of backward: each adds up the weight's gradient of some rows.
_PROGRAMS = 264
# Of every kernel that normalises: the order of a row's sum depends on it.
WARPS = 8


def rms_norm_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Normalise rows in fp32.

    Args:
        x: [rows, width], bf16, fp16 or fp32, the last axis contiguous.
        weight: [width].
        eps: Added to the mean square.
        zero_centered: Whether 1 is added to the weight.
        dtype: Of the result.

    Returns:
        The result, [rows, width], and 1 / root mean square of each row, [rows], fp32.
    """
    rows, width = x.shape
    with not_filled():
        result = torch.empty(rows, width, dtype=dtype, device=x.device)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if result.numel():
        with torch.cuda.device_of(x):
            _forward_kernel[(rows,)](
                x,
                weight,
                result,
                scale,
                width,
                x.stride(0),
                eps,
                BLOCK=triton.next_power_of_2(width),
                ZERO_CENTERED=zero_centered,
                INTERPRETED=interpreted(),
                num_warps=WARPS,
            )
    return result, scale


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`rms_norm_forward`, computed in fp32, the same in every call.

    Args:
        grad: Of the result, [rows, width], contiguous.
        scale: From forward.

    Returns:
        Gradients of ``x`` and ``weight``, in their dtypes.
    """
    rows, width = x.shape
    programs = min(rows, _PROGRAMS)
    with not_filled():
        x_grad = torch.empty_like(x)
        weight_grads = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    if x_grad.numel():
        with torch.cuda.device_of(x):
            _backward_kernel[(programs,)](
                grad,
                x,
                weight,
                scale,
                x_grad,
                weight_grads,
                rows,
                width,
                BLOCK=triton.next_power_of_2(width),
                ZERO_CENTERED=zero_centered,
                INTERPRETED=interpreted(),
                num_warps=WARPS,
            )
    return x_grad, weight_grads.sum(0).to(weight.dtype)


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    result_ptr,
    scale_ptr,
    width,
    stride,
    eps,
    BLOCK: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    result, scale = normed_row(x, weight_ptr + column, inside, width, eps, ZERO_CENTERED)
    result = narrow(result, result_ptr.dtype.element_ty, INTERPRETED)
    tl.store(result_ptr + row * width + column, result, mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    x_grad_ptr,
    weight_grads_ptr,
    rows,
    width,
    BLOCK: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = _weight(weight_ptr + column, inside, ZERO_CENTERED)
    weight_grad = tl.full([BLOCK], 0.0, tl.float32)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        grad = tl.load(grad_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        normed = x * scale
        weight_grad += grad * normed
        grad = grad * weight
        # The weight is in the mean already.
        x_grad = scale * (grad - normed * (sum_of(grad * normed) / width))
        x_grad = narrow(x_grad, x_grad_ptr.dtype.element_ty, INTERPRETED)
        tl.store(x_grad_ptr + row * width + column, x_grad, mask=inside)
    weight_grads = weight_grads_ptr + tl.program_id(0).to(tl.int64) * width + column
    tl.store(weight_grads, weight_grad, mask=inside)


@triton.jit
def normed_row(x, weights, inside, width, eps, ZERO_CENTERED: tl.constexpr):
    """A row [BLOCK] in fp32, 0 where not inside, normalised; and 1 / its root mean square."""
    scale = 1.0 / tl.sqrt(sum_of(x * x) / width + eps)
    return x * scale * _weight(weights, inside, ZERO_CENTERED), scale


@triton.jit
def _weight(pointers, inside, ZERO_CENTERED: tl.constexpr):
    """The factors [BLOCK], in fp32."""
    weight = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    return weight
