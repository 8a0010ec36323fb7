"""One output from those over parts of the keys, merged by their LSE in the order of the keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.paged.plan import Tiles
from absorbed_mla.kernels.portable.common import LN_2, interpreted, load_rows, store_rows
from absorbed_mla.kernels.portable.forward import normalised

_ROWS = 8


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
    _, tokens, heads, width = parts.shape
    grid = (len(table), triton.cdiv(tiles.tokens * heads, _ROWS))
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
        ROWS=_ROWS,
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
    ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    entry = table_ptr + tl.program_id(0) * 5
    first, tokens = tl.load(entry + 1), tl.load(entry + 2)
    keys = tl.minimum(tl.load(entry + 3) + tokens - 1, window)
    chunk = tl.load(entry + 4)
    if (keys <= chunk) | (tokens == 0):
        return
    # [ROWS]; a row is a head of a token, as they lie in the output
    index = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = index < tokens * heads
    row = first.to(tl.int64) * heads + index
    stride = num_tokens.to(tl.int64) * heads

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for split in range((keys + chunk - 1) // chunk):
        lse = tl.load(parts_lse_ptr + split * stride + row, mask=valid, other=float("-inf"))
        largest = tl.maximum(largest, lse)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, C], 0.0, tl.float32)
    for split in range((keys + chunk - 1) // chunk):
        lse = tl.load(parts_lse_ptr + split * stride + row, mask=valid, other=float("-inf"))
        weight = tl.exp2(lse - shift)
        total += weight
        acc += weight[:, None] * load_rows(parts_ptr, (split * stride + row) * C, valid, C)
    acc, lse = normalised(largest, total, acc)
    store_rows(out_ptr, row * C, valid, acc, C, INTERPRETED)
    tl.store(lse_ptr + row, lse * LN_2, mask=valid)
