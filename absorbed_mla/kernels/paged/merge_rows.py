"""Merge the results of each token's two rows, a prefix and another, by their LSE.

A tile's result is whole, or its splits wait to be combined: all are added up together.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.paged.combine import COLUMNS, add_splits, store_sum
from absorbed_mla.kernels.paged.plan import Tiles
from absorbed_mla.kernels.paged.schedule import TABLE_COLUMNS, Schedule
from absorbed_mla.kernels.triton.common import LOG2_E, interpreted

# Results that a program of 128 threads loads at once for each of some rows of the output.
_RESULTS = 16
_ROWS = 2


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
        whole: Output [2 T, N, C] and LSE [2 T, N] of tiles in one part: T tokens in rows that are
            no prefixes, then in prefixes.
        table: Of the batch.
        tiles: Tiles of the queries.
        result: Output [T, N, C] and LSE [T, N], contiguous.
    """
    tokens, heads, kv_lora_rank = result[0].shape
    columns = min(kv_lora_rank, COLUMNS)
    launch(
        _merge_rows_kernel,
        (tokens, -(-heads * (kv_lora_rank // columns) // _ROWS)),
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
        COLUMNS=columns,
        ROWS=_ROWS,
        RESULTS=_RESULTS,
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
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    RESULTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    token = tl.program_id(0)
    # [ROWS]: pieces of heads
    piece = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    head, inside = piece // (C // COLUMNS), piece < heads * (C // COLUMNS)
    # [ROWS, COLUMNS]
    column = (piece % (C // COLUMNS) * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    first, count, first_part, behind = _read_tile(tiles_ptr, tl.load(token_tiles_ptr + 2 * token))
    other = _read_tile(tiles_ptr, tl.load(token_tiles_ptr + 2 * token + 1))
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for start in range(0, count + other[1], RESULTS):
        # [RESULTS]: those of the prefix, then those of the other row
        number = start + tl.arange(0, RESULTS)
        shared, there = number < count, number < count + other[1]
        number = tl.where(shared, number, number - count)
        in_tile = token - tl.where(shared, first, other[0])
        waits = there & (tl.where(shared, count, other[1]) > 1)
        place = 2 * (tl.where(shared, first_part, other[2]) + number) + tl.where(number == 0, 1, 0)
        source = place.to(tl.int64) * (head_blocks * TOKENS * HEADS) + in_tile * HEADS
        row = (token + tl.where(shared, behind, other[3])).to(tl.int64) * heads
        # [ROWS, RESULTS]
        source = source[None, :] + (head // HEADS * (TOKENS * HEADS) + head % HEADS)[:, None]
        row = row[None, :] + head[:, None]
        split, alone = inside[:, None] & waits[None, :], inside[:, None] & (there & ~waits)[None, :]
        lse = tl.load(whole_lse_ptr + row, mask=alone, other=float("-inf")) * LOG2_E
        lse = tl.load(split_lse_ptr + source, mask=split, other=lse)
        # [ROWS, RESULTS, COLUMNS]
        values = tl.load(
            whole_out_ptr + row[:, :, None] * C + column[:, None, :],
            mask=alone[:, :, None],
            other=0.0,
        ).to(tl.float32)
        values = tl.load(
            split_out_ptr + source[:, :, None] * C + column[:, None, :],
            mask=split[:, :, None],
            other=values,
        )
        top, total, acc = add_splits(top, total, acc, lse, values)
    row = token.to(tl.int64) * heads + head
    is_first = inside & (piece % (C // COLUMNS) == 0)
    store_sum(out_ptr, lse_ptr, row, column, (inside, is_first), (top, total, acc), C, INTERPRETED)


@triton.jit
def _read_tile(tiles_ptr, number):
    """First token, parts, first part, and where results lie; no parts without a tile."""
    entry = tiles_ptr + tl.maximum(number, 0) * TABLE_COLUMNS
    count = tl.where(number < 0, 0, tl.load(entry + 5))
    return tl.load(entry + 1), count, tl.load(entry + 6), tl.load(entry + 7)
