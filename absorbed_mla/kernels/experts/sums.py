"""The sum of a token's experts, read where their rows lie."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.triton.common import interpreted, narrow

_COLUMNS = 1024


def summed(rows: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """Sums in fp32 in the order of the choices, rounded once.

    Args:
        rows: [R, H], contiguous.
        places: Int64 [T, K], contiguous: the row of every choice.
        ends: Int32 [E]; rows behind the last end belong to other ranks, and count for nothing.

    Returns:
        [T, H].
    """
    (tokens, choices), width = places.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    columns = min(triton.next_power_of_2(width), _COLUMNS)
    with torch.cuda.device_of(out):
        _sums_kernel[(tokens, triton.cdiv(width, columns))](
            rows,
            places,
            ends,
            out,
            len(ends),
            width,
            CHOICES=choices,
            COLUMNS=columns,
            INTERPRETED=interpreted(),
            num_warps=4,
        )
    return out


@triton.jit
def _sums_kernel(
    rows_ptr,
    places_ptr,
    ends_ptr,
    out_ptr,
    experts,
    width,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    end = tl.load(ends_ptr + experts - 1)
    total = tl.full([COLUMNS], 0.0, tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places_ptr + token * CHOICES + choice)
        pointers = rows_ptr + place * width + column
        total += tl.load(pointers, mask=there & (place < end), other=0.0).to(tl.float32)
    total = narrow(total, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + token * width + column, total, mask=there)
