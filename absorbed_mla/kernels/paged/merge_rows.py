"""Merge the results of each token's two rows, a prefix and a suffix, by their LSE.

Partial results of split-KV are combined here, too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.paged.plan import Tiles
from absorbed_mla.kernels.paged.schedule import TABLE_COLUMNS, Schedule
from absorbed_mla.kernels.triton.common import LN_2, LOG2_E, interpreted, narrow

# Partial results that are loaded at once.
_SPLITS = 8


def merge_rows(
    waiting: tuple[Tensor, Tensor],
    whole: tuple[Tensor, Tensor],
    table: Schedule,
    tiles: Tiles,
    result: tuple[Tensor, Tensor],
) -> None:
    """Write output and LSE of all tokens; 0 and -inf of one in no row, or that sees no key.

    Args:
        waiting: Outputs and LSE of splits, as in ``combine``.
        whole: Output [2 T, N, C] and LSE [2 T, N] of tiles in one part: of T tokens in the rows
            that are no prefixes, then in prefixes. Contiguous.
        table: Of the batch.
        tiles: Tiles of the queries.
        result: Output [T, N, C] and LSE [T, N], contiguous.
    """
    tokens, heads, kv_lora_rank = result[0].shape
    launch(
        _merge_rows_kernel,
        (tokens, heads),
        *waiting,
        *whole,
        *result,
        table.tiles,
        table.token_tiles,
        heads,
        tiles.head_blocks,
        HEADS=tiles.heads,
        TOKENS=tiles.tokens,
        C=kv_lora_rank,
        SPLITS=_SPLITS,
        INTERPRETED=interpreted(),
        num_warps=4,
    )


@triton.jit
def _merge_rows_kernel(
    split_out_ptr,
    split_lse_ptr,
    whole_out_ptr,
    whole_lse_ptr,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    token_tiles_ptr,
    heads,
    head_blocks,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    prefix = _read_tile(tiles_ptr, tl.load(token_tiles_ptr + 2 * token))
    other = _read_tile(tiles_ptr, tl.load(token_tiles_ptr + 2 * token + 1))
    # Both are on their way before any is added.
    row = token.to(tl.int64) * heads + head
    of_prefix = _load(whole_out_ptr, whole_lse_ptr, row + prefix[3] * heads, prefix[1] == 1, C)
    of_other = _load(whole_out_ptr, whole_lse_ptr, row + other[3] * heads, other[1] == 1, C)
    in_tile = head // HEADS * (TOKENS * HEADS) + head % HEADS
    splits = tl.where(prefix[1] > 1, prefix[1], 0)
    all_splits = splits + tl.where(other[1] > 1, other[1], 0)
    top, total, acc = float("-inf"), 0.0, tl.full([C], 0.0, tl.float32)
    for start in range(0, all_splits, SPLITS):
        found = ()
        for index in tl.static_range(SPLITS):
            number = start + index
            there, second = number < all_splits, number >= splits
            number -= tl.where(second, splits, 0)
            part = tl.where(second, other[2], prefix[2]) + number
            place = (2 * part + tl.where(number == 0, 1, 0)).to(tl.int64)
            place = place * (head_blocks * TOKENS * HEADS) + in_tile
            place += (token - tl.where(second, other[0], prefix[0])) * HEADS
            found += (_load(split_out_ptr, split_lse_ptr, place, there, C),)
        top, total, acc = _add(top, total, acc, found, SPLITS)
    whole = (of_prefix[0] * LOG2_E, of_prefix[1]), (of_other[0] * LOG2_E, of_other[1])
    top, total, acc = _add(top, total, acc, whole, 2)
    blind = total == 0.0
    out = narrow(acc / tl.where(blind, 1.0, total), out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + row * C + tl.arange(0, C), out)
    tl.store(lse_ptr + row, tl.where(blind, float("-inf"), (top + tl.log2(total)) * LN_2))


@triton.jit
def _read_tile(tiles_ptr, number):
    """First token, parts, first part, and how far behind results lie; no parts without a tile."""
    entry = tiles_ptr + tl.maximum(number, 0) * TABLE_COLUMNS
    parts = tl.where(number < 0, 0, tl.load(entry + 5))
    return tl.load(entry + 1), parts, tl.load(entry + 6), tl.load(entry + 7).to(tl.int64)


@triton.jit
def _load(out_ptr, lse_ptr, row, there, C: tl.constexpr):
    """LSE and output of a row, [C], if it is there."""
    lse = tl.load(lse_ptr + row, mask=there, other=float("-inf"))
    out = tl.load(out_ptr + row * C + tl.arange(0, C), mask=there, other=0.0)
    return lse, out.to(tl.float32)


@triton.jit
def _add(top, total, acc, results, NUMBER: tl.constexpr):
    """Add so many results to those before.

    Args:
        top: The largest LSE of those before, to base 2.
        total: The sum of their weights.
        acc: Of their weighted outputs, [C].
        results: LSE, to base 2, and output of each.
        NUMBER: How many.
    """
    higher = top
    for index in tl.static_range(NUMBER):
        higher = tl.maximum(higher, results[index][0])
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    decay = tl.exp2(top - shift)
    total, acc = total * decay, acc * decay
    # Weights wait for no output, so that all of these are on their way at the same time.
    for index in tl.static_range(NUMBER):
        weight = tl.exp2(results[index][0] - shift)
        total += weight
        acc += results[index][1] * weight
    return higher, total, acc
