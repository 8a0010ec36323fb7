"""One output from those over parts of the keys, merged by their LSE in the order of the keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.paged.plan import Tiles
from absorbed_mla.kernels.portable.common import LN_2, interpreted, narrow

# Parts and columns of a row that are loaded at a time: a row alone has up to a part for each
# multiprocessor, whose loads must not wait for each other.
_PARTS = 32
_COLUMNS = 128


def combine(
    parts: Tensor, parts_lse: Tensor, table: Tensor, window: int, tiles: Tiles, result
) -> None:
    """Write output and LSE of the tokens whose keys are in several parts.

    Args:
        parts: Fp32 [splits, T, N, C]; read where a part has keys.
        parts_lse: Fp32 [splits, T, N], in bits.
        table: Of :func:`schedule`.
        window: Keys in the cache.
        tiles: How rows were cut.
        result: Output [T, N, C] and LSE [T, N], contiguous.
    """
    out, lse = result
    most, tokens, heads, width = parts.shape
    columns = min(width, _COLUMNS)
    grid = (len(table), tiles.tokens * heads, width // columns)
    _combine_kernel[grid](
        parts,
        parts_lse,
        out,
        lse,
        table,
        window,
        tokens,
        heads,
        C=width,
        PARTS=min(triton.next_power_of_2(most), _PARTS),
        COLUMNS=columns,
        INTERPRETED=interpreted(),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["window", "num_tokens"])
def _combine_kernel(
    parts_ptr,
    parts_lse_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    window,
    num_tokens,
    heads,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    entry = table_ptr + tl.program_id(0) * 5
    first, tokens = tl.load(entry + 1), tl.load(entry + 2)
    keys = tl.minimum(tl.load(entry + 3) + tokens - 1, window)
    chunk = tl.load(entry + 4)
    # A head of a token, as they lie in the output.
    index = tl.program_id(1)
    if (keys <= chunk) | (index >= tokens * heads):
        return
    row = first.to(tl.int64) * heads + index
    stride = num_tokens.to(tl.int64) * heads
    count = (keys + chunk - 1) // chunk
    # [PARTS], [COLUMNS]
    part = tl.arange(0, PARTS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)

    largest = tl.full([PARTS], float("-inf"), tl.float32)
    for start in range(0, count, PARTS):
        place = (start + part).to(tl.int64) * stride + row
        lse = tl.load(parts_lse_ptr + place, mask=start + part < count, other=float("-inf"))
        largest = tl.maximum(largest, lse)
    top = tl.reduce(largest, 0, tl.standard._elementwise_max)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.full([PARTS], 0.0, tl.float32)
    acc = tl.full([PARTS, COLUMNS], 0.0, tl.float32)
    for start in range(0, count, PARTS):
        place = (start + part).to(tl.int64) * stride + row
        there = start + part < count
        lse = tl.load(parts_lse_ptr + place, mask=there, other=float("-inf"))
        weight = tl.exp2(lse - shift)
        total += weight
        values = parts_ptr + place[:, None] * C + column[None, :]
        acc += weight[:, None] * tl.load(values, mask=there[:, None], other=0.0)
    # Sums in an order that the number of parts alone decides.
    whole = tl.reduce(total, 0, tl.standard._sum_combine)
    blind = whole == 0.0
    out = tl.reduce(acc, 0, tl.standard._sum_combine) / tl.where(blind, 1.0, whole)
    tl.store(out_ptr + row * C + column, narrow(out, out_ptr.dtype.element_ty, INTERPRETED))
    if tl.program_id(2) == 0:
        tl.store(lse_ptr + row, tl.where(blind, float("-inf"), (top + tl.log2(whole)) * LN_2))
