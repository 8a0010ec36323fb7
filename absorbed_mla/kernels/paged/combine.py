"""Combine the outputs of split-KV by their LSE, in the order of the keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.paged.plan import SplitKV, Tiles
from absorbed_mla.kernels.paged.schedule import TABLE_COLUMNS, Schedule
from absorbed_mla.kernels.triton.common import LN_2, interpreted, narrow

# Values that a program of 128 threads loads at once, columns of a row of the output that it
# computes, and bounds of the splits that it loads at once.
_LOADED = 4096
_COLUMNS = 512
_SPLITS = (2, 32)
# Programs for each attention program that runs at a time: a program takes many rows, since most
# need no combining.
_PROGRAMS = 8


def combine(
    split_out: Tensor, split_lse: Tensor, table: Schedule, tiles: Tiles, split_kv: SplitKV, result
) -> None:
    """Write output and LSE of the tokens whose keys were split.

    Args:
        split_out: Fp32 [places, head blocks, rows of a tile, C]; read where a split has keys.
        split_lse: Fp32 [places, head blocks, rows of a tile], base 2.
        table: Of the batch.
        tiles: Tiles of the queries.
        split_kv: Bounds of the splits.
        result: Output [T, N, C] and LSE [T, N], contiguous.
    """
    out, lse = result
    heads, kv_lora_rank = out.shape[1:]
    expected = triton.cdiv(split_kv.programs, tiles.max_tiles * tiles.head_blocks)
    together = min(max(triton.next_power_of_2(expected), _SPLITS[0]), _SPLITS[1])
    columns = min(kv_lora_rank, _COLUMNS, _LOADED // together)
    rows = max(_LOADED // (together * columns), 1)
    groups = triton.cdiv(min(tiles.tokens, tiles.max_tokens) * heads, rows)
    programs = max(_PROGRAMS * split_kv.programs // tiles.max_tiles, 1)
    rounds = triton.cdiv(groups, programs)
    _combine_kernel[(tiles.max_tiles, triton.cdiv(groups, rounds), kv_lora_rank // columns)](
        split_out,
        split_lse,
        out,
        lse,
        table.tiles,
        rounds,
        heads,
        tiles.head_blocks,
        HEADS=tiles.heads,
        TOKENS=tiles.tokens,
        C=kv_lora_rank,
        ROWS=rows,
        SPLITS=together,
        COLUMNS=columns,
        INTERPRETED=interpreted(),
        num_warps=4,
    )


def places(tiles: Tiles, split_kv: SplitKV) -> int:
    """Maximum splits whose results wait to be combined; 0 without splits."""
    return min(2 * split_kv.max_extra, tiles.max_tiles + split_kv.max_extra)


@triton.jit(do_not_specialize=["rounds"])
def _combine_kernel(
    split_out_ptr,
    split_lse_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    rounds,
    heads,
    head_blocks,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    entry = table_ptr + tl.program_id(0) * TABLE_COLUMNS
    first, tokens, keys = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    split_keys = tl.load(entry + 3)
    if (tokens == 0) | (keys <= split_keys):
        return
    first_place, equal, last_place = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    count = (keys + split_keys - 1) // split_keys
    # [SPLITS], [COLUMNS]
    number = tl.arange(0, SPLITS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    for one in range(rounds):
        # [ROWS]: heads of tokens as they lie in the output, and in a tile.
        index = (tl.program_id(1) * rounds + one) * ROWS + tl.arange(0, ROWS)
        inside = index < tokens * heads
        token, head = index // heads, index % heads
        place_in_tile = head // HEADS * (TOKENS * HEADS) + token * HEADS + head % HEADS
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
        acc = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
        # In an order that depends on the number of splits only.
        for start in range(0, count, SPLITS):
            split = start + number
            place = tl.where(split < equal, first_place + split, last_place).to(tl.int64)
            # [ROWS, SPLITS]
            source = place[None, :] * (head_blocks * TOKENS * HEADS) + place_in_tile[:, None]
            there = (split < count)[None, :] & inside[:, None]
            lse = tl.load(split_lse_ptr + source, mask=there, other=float("-inf"))
            # [ROWS, SPLITS, COLUMNS]
            values = tl.load(
                split_out_ptr + source[:, :, None] * C + column[None, None, :],
                mask=there[:, :, None],
                other=0.0,
            )
            higher = tl.maximum(top, tl.reduce(lse, 1, tl.standard._elementwise_max))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            decay = tl.exp2(top - shift)
            weight = tl.exp2(lse - shift[:, None])
            total = total * decay + tl.reduce(weight, 1, tl.standard._sum_combine)
            weighted = tl.reduce(values * weight[:, :, None], 1, tl.standard._sum_combine)
            acc = acc * decay[:, None] + weighted
            top = higher
        blind = total == 0.0
        out = acc / tl.where(blind, 1.0, total)[:, None]
        row = first.to(tl.int64) * heads + index
        pointers = out_ptr + row[:, None] * C + column[None, :]
        tl.store(pointers, narrow(out, out_ptr.dtype.element_ty, INTERPRETED), mask=inside[:, None])
        if tl.program_id(2) == 0:
            value = tl.where(blind, float("-inf"), (top + tl.log2(total)) * LN_2)
            tl.store(lse_ptr + row, value, mask=inside)
