"""Fused residual addition and RMSNorm, in one pass over each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.invariant.rms_norm import WARPS, normed_row
from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.triton.common import interpreted, narrow


def added_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """``x + residual`` and its RMSNorm, to the bit what the two give one after the other.

    Args:
        x: [..., width], contiguous, bf16, fp16 or fp32.
        residual: Likewise.
        weight: Of the norm, [width], of the same dtype.
        eps: Added to the mean square.
        zero_centered: Whether 1 is added to the weight.

    Returns:
        The sum, rounded, and what the norm makes of that; both like ``x``.
    """
    total, normed = torch.empty_like(x), torch.empty_like(x)
    # A plain tensor, for which a launch is cheap.
    width, weight = x.shape[-1], weight.detach()
    if x.numel():
        # Triton launches on the current device, whatever the tensors' is.
        with torch.cuda.device_of(x):
            launch(
                _added_norm_kernel,
                (x.numel() // width,),
                *(x, residual, weight, total, normed, width, eps),
                BLOCK=triton.next_power_of_2(width),
                ZERO_CENTERED=zero_centered,
                INTERPRETED=interpreted(),
                num_warps=WARPS,
            )
    return total, normed


@triton.jit
def _added_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    total_ptr,
    normed_ptr,
    width,
    eps,
    BLOCK: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = tl.program_id(0).to(tl.int64) * width + column
    total = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    total = narrow(total, total_ptr.dtype.element_ty, INTERPRETED)
    tl.store(total_ptr + place, total, mask=inside)
    weights = weight_ptr + column
    normed, _ = normed_row(total.to(tl.float32), weights, inside, width, eps, ZERO_CENTERED)
    normed = narrow(normed, normed_ptr.dtype.element_ty, INTERPRETED)
    tl.store(normed_ptr + place, normed, mask=inside)
