"""Token unpermutation: the sum of a token's experts, read where their rows lie."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.triton.common import interpreted, narrow
from absorbed_mla.kernels.triton_private import elementwise_min

_COLUMNS = 1024
# Behind all rows.
_NOWHERE = tl.constexpr(2**62)


def summed(rows: Tensor, places: Tensor, ends: Tensor, *, one_by_one: bool = False) -> Tensor:
    """Sums in fp32 in the order of the choices, rounded once.

    Args:
        rows: [R, H], contiguous.
        places: Int64 [T, K], contiguous: the row of every choice.
        ends: Int32 [E]; rows behind the last end belong to other ranks, and count for nothing.
        one_by_one: Sum in the order of the rows, rounded after each: as Megatron's dispatchers do
            where they are deterministic.

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
            SLOTS=triton.next_power_of_2(choices),
            COLUMNS=columns,
            ONE_BY_ONE=one_by_one,
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
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_BY_ONE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    end = tl.load(ends_ptr + experts - 1)
    total = tl.full([COLUMNS], 0.0, tl.float32)
    if ONE_BY_ONE:
        slot = tl.arange(0, SLOTS)
        places = tl.load(places_ptr + token * CHOICES + slot, mask=slot < CHOICES, other=_NOWHERE)
    for choice in tl.static_range(CHOICES):
        if ONE_BY_ONE:
            place = tl.reduce(places, 0, elementwise_min)
            places = tl.where(places == place, _NOWHERE, places)
        else:
            place = tl.load(places_ptr + token * CHOICES + choice)
        pointers = rows_ptr + place * width + column
        total += tl.load(pointers, mask=there & (place < end), other=0.0).to(tl.float32)
        if ONE_BY_ONE:
            total = narrow(total, out_ptr.dtype.element_ty, INTERPRETED).to(tl.float32)
    total = narrow(total, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + token * width + column, total, mask=there)
