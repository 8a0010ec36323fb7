"""Fused SwiGLU kernel of MLPs and experts: the down-projection's input in one pass.

With ``rounds_each_step`` it has the bits of Megatron's operators, which parity mode needs: each of
PyTorch's kernels computes in fp32 and rounds what it stores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from absorbed_mla.kernels.triton.common import interpreted, narrow

_COLUMNS = 2048


def gated(gate_and_up: Tensor, *, rounds_each_step: bool = False) -> Tensor:
    """``silu(gate) * up``, rounded once.

    Args:
        gate_and_up: [..., 2 F]; the gate in the first half.
        rounds_each_step: See :func:`swiglu`.

    Returns:
        [..., F].
    """
    *shape, width = gate_and_up.shape
    rows = gate_and_up.reshape(-1, width).contiguous()
    # Not -1: an expert may have no tokens.
    return swiglu(rows, rounds_each_step=rounds_each_step).view(*shape, width // 2)


def swiglu(
    gate_and_up: Tensor,
    probs: Tensor | None = None,
    choices: Tensor | None = None,
    ends: Tensor | None = None,
    *,
    rounds_each_step: bool = False,
) -> Tensor:
    """``silu(gate) * up * prob`` of every row, rounded once.

    Args:
        gate_and_up: [R, 2 F], contiguous; the gate in the first half.
        probs: Of the tokens' choices, [T, K], contiguous, any float dtype; None, like the next two,
            for rows that nobody routes.
        choices: Int64 [R], the choice of each row; see ``experts.rows.PermutedTokens``.
        ends: Int32 [E], likewise.
        rounds_each_step: Round ``silu(gate)`` and each product to the dtype, as PyTorch; ``probs``
            must not be fp64.

    Returns:
        [R, F]; rows behind the last end are undefined.
    """
    rows, width = len(gate_and_up), gate_and_up.shape[1] // 2
    out = gate_and_up.new_empty(rows, width)
    if not out.numel():
        return out
    columns = min(triton.next_power_of_2(width), _COLUMNS)
    with torch.cuda.device_of(out):
        _swiglu_kernel[(rows, triton.cdiv(width, columns))](
            gate_and_up,
            probs,
            choices,
            ends,
            out,
            0 if ends is None else len(ends),
            width,
            COLUMNS=columns,
            ROUTED=ends is not None,
            ROUNDS_EACH_STEP=rounds_each_step,
            INTERPRETED=interpreted(),
            num_warps=8 if columns == _COLUMNS else 4,
        )
    return out


@triton.jit
def _swiglu_kernel(
    gate_ptr,
    probs_ptr,
    choices_ptr,
    ends_ptr,
    out_ptr,
    experts,
    width,
    COLUMNS: tl.constexpr,
    ROUTED: tl.constexpr,
    ROUNDS_EACH_STEP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if ROUTED:
        # Before the end is known: each load waits for the one before it.
        prob = tl.load(probs_ptr + tl.load(choices_ptr + row)).to(tl.float32)
        if row >= tl.load(ends_ptr + experts - 1):
            return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    pointers = gate_ptr + row * (2 * width) + column
    gate = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
    up = tl.load(pointers + width, mask=there, other=0.0).to(tl.float32)
    if ROUNDS_EACH_STEP:
        value = _rounded(_silu_of_pytorch(gate, INTERPRETED), out_ptr, INTERPRETED)
        # Megatron adds an offset of zero, which makes 0 of -0.
        value = _rounded(value * (up + 0.0), out_ptr, INTERPRETED)
    else:
        value = gate / (1 + tl.exp(-gate)) * up
    if ROUTED:
        value *= prob
    value = narrow(value, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + row * width + column, value, mask=there)


@triton.jit
def _silu_of_pytorch(x, INTERPRETED: tl.constexpr):
    """By the functions of CUDA that PyTorch calls: ``tl.exp`` and ``/`` are less exact."""
    power = tl.exp(-x) if INTERPRETED else libdevice.exp(-x)
    return tl.div_rn(x, 1 + power)


@triton.jit
def _rounded(values, pointer, INTERPRETED: tl.constexpr):
    """fp32 values as they are once stored."""
    return narrow(values, pointer.dtype.element_ty, INTERPRETED).to(tl.float32)
