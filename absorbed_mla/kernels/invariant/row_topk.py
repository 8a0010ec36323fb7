"""Stable top-k of short rows, such as a router's scores, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.scratch import not_filled
from absorbed_mla.kernels.triton_private import elementwise_max

# Of a warp, which is a program: several would exchange what each found.
_THREADS = 32


def row_topk(x: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """``torch.sort(x, descending=largest, stable=True)``, of each row the first k elements.

    As there, of equal elements the one with the lower index comes first, 0 and -0 are equal, and
    NaN is the greatest. There is no gradient: it runs below PyTorch's autograd.

    Args:
        x: [..., columns], not empty, bf16, fp16 or fp32, with any strides; where one stride does
            not lead from row to row it is copied.
        k: Elements of each row, at least 1 and at most ``columns``.
        largest: Whether the greatest come first, else the least.

    Returns:
        Elements [..., k], bit by bit, and their indices, int64 [..., k].
    """
    shape = *x.shape[:-1], k
    with not_filled():
        values, indices = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
    if x.ndim != 2:
        x = x.reshape(-1, x.shape[-1])
    block = triton.next_power_of_2(x.shape[1])
    tile_rows = max(1, _THREADS // block)
    with torch.cuda.device_of(x):
        launch(
            _topk_kernel,
            (triton.cdiv(len(x), tile_rows),),
            *(x, values, indices, *x.shape, *x.stride(), k),
            ROWS=tile_rows,
            BLOCK=block,
            SLOTS=triton.next_power_of_2(k),
            LARGEST=largest,
            num_warps=1,
        )
    return values, indices


@triton.jit(do_not_specialize=["rows", "k"])
def _topk_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    k,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column, slot = tl.arange(0, BLOCK)[None, :], tl.arange(0, SLOTS)[None, :]
    begin, there = x_ptr + row * row_stride, column < columns
    pointers = begin + column.to(tl.int64) * column_stride
    x = tl.load(pointers, mask=(row < rows) & there, other=0.0)
    # No element has it; nor does what was found already.
    least: tl.constexpr = -(2**31)
    key = tl.where(there, _key(x, LARGEST), least)
    found = tl.full([ROWS, SLOTS], 0, tl.int32)
    for i in range(k):
        wanted = key == _greatest(key)
        first = -_greatest(tl.where(wanted, -column, -BLOCK))
        found = tl.where(slot == i, first, found)
        key = tl.where(column == first, least, key)
    there = (row < rows) & (slot < k)
    found = found.to(tl.int64)
    # Other threads have the elements than store them.
    values = tl.load(begin + found * column_stride, mask=there)
    tl.store(values_ptr + row * k + slot, values, mask=there)
    tl.store(indices_ptr + row * k + slot, found, mask=there)


@triton.jit
def _key(x, LARGEST: tl.constexpr):
    """An integer that is the greater, the earlier an element comes."""
    # By bits: of numbers, the smallest might be taken for 0.
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    infinity: tl.constexpr = 0x7C000000 if x.dtype == tl.float16 else 0x7F800000
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    # -0, which is the greatest of negative numbers.
    key = tl.where(key == -1, 0, key)
    key = tl.where((bits & 0x7FFFFFFF) > infinity, infinity + 1, key)
    return key if LARGEST else ~key


# tl.max would not run in Triton's interpreter, which needs this by name.
@triton.jit
def _greatest(x):
    """Of each row, [ROWS, 1]; for a warp's integers it is one instruction."""
    return tl.reduce(x, 1, elementwise_max, keep_dims=True)
