"""Which program attends from which tokens to which keys, made on the device from the rows' tables.

A tile is some tokens of one row of the batch. The keys of a row are cut into parts, equal but for
the last, where the device would be idle otherwise (part_size.py). A program takes a part of a tile;
programs begin in the order of their table: equal parts, the longest, come first, those that are
left over last. Two tables:

* ``programs``, int32 [programs, 8]: row, first token on the token axis, number of tokens (0:
  nothing to do), keys that the first token sees (each token sees one more than the one before it;
  not above 0: none), first key and the one past the last, and the place where the result waits for
  the other parts, or -1 if there are none. Keys are counted from the first one in the cache.
* ``tiles``, int32 [tiles, 8], for putting parts together: first token, number of tokens, keys that
  any of them sees, keys of a part, place of the first part, number of parts that wait one behind
  the other from there on, and place of the part that may follow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.paged.plan import Cut, Tiles
from absorbed_mla.kernels.paged.split_kv import load_lengths, parts_of, size_of_parts, work
from absorbed_mla.kernels.triton.common import narrow

TABLE_COLUMNS = tl.constexpr(8)
_PROGRAMS = 32
_ROWS_AT_A_TIME = 128
# Entries of the table of programs that are stored together.
_STORED = 512


class Schedule(NamedTuple):
    """Both tables; see above."""

    programs: Tensor
    tiles: Tensor


def schedule(
    query_starts: Tensor,
    query_lengths: Tensor,
    kv_lengths: Tensor,
    key_start: int,
    window: int,
    tiles: Tiles,
    cut: Cut,
    block_keys: int,
    out: Tensor,
    lse: Tensor,
    interpreted: bool,
) -> Schedule:
    """Make the tables; it also writes 0 and -inf for tokens that are in no row.

    Args:
        query_starts: As in ``Rows``, like the next two.
        query_lengths: Int32 [R].
        kv_lengths: Int32 [R].
        key_start: First key in the cache.
        window: Keys in the cache.
        tiles: How rows are cut.
        cut: How their keys may be.
        block_keys: Keys that a program loads at a time.
        out: [T, N, C], contiguous.
        lse: [T, N], contiguous.
        interpreted: Whether this runs in the interpreter.
    """
    tokens, heads, width = out.shape
    table = out.new_empty((tiles.most + cut.more, TABLE_COLUMNS.value), dtype=torch.int32)
    tile_table = out.new_empty((tiles.most, TABLE_COLUMNS.value), dtype=torch.int32)
    # Tiles of long rows are several programs' work.
    tile_programs = min(triton.cdiv(tiles.row_tokens, tiles.tokens), _PROGRAMS)
    rows = min(max(triton.next_power_of_2(len(query_starts)), 16), _ROWS_AT_A_TIME)
    _schedule_kernel[(tile_programs + tokens,)](
        query_starts,
        query_lengths,
        kv_lengths,
        table,
        tile_table,
        out,
        lse,
        len(query_starts),
        key_start,
        window,
        tiles.most,
        tile_programs,
        cut.more,
        cut.programs,
        cut.least,
        cut.fixed,
        tiles.head_blocks,
        heads,
        TILE_TOKENS=tiles.tokens,
        BLOCK_KEYS=block_keys,
        ROWS=rows,
        PARTS=_STORED // rows,
        C=width,
        INTERPRETED=interpreted,
        num_warps=4,
    )
    return Schedule(table, tile_table)


# What changes with every batch is not compiled in.
@triton.jit(
    do_not_specialize=[
        "num_rows",
        "key_start",
        "window",
        "num_tiles",
        "tile_programs",
        "more",
        "at_a_time",
        "least",
        "fixed",
    ],
    do_not_specialize_on_alignment=["starts_ptr", "lengths_ptr", "kv_ptr"],
)
def _schedule_kernel(
    starts_ptr,
    lengths_ptr,
    kv_ptr,
    table_ptr,
    tile_table_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    key_start,
    window,
    num_tiles,
    tile_programs,
    more,
    at_a_time,
    least,
    fixed,
    head_blocks,
    heads,
    TILE_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    program = tl.program_id(0)
    if program >= tile_programs:
        token = program - tile_programs
        _clear_if_in_no_row(
            starts_ptr, lengths_ptr, out_ptr, lse_ptr, num_rows, token, heads, ROWS, C, INTERPRETED
        )
        return
    part_blocks, all_equal = size_of_parts(
        lengths_ptr,
        kv_ptr,
        num_rows,
        key_start,
        window,
        more,
        at_a_time,
        least,
        fixed,
        head_blocks,
        TILE_TOKENS,
        BLOCK_KEYS,
        ROWS,
    )
    all_tiles, equal_parts, uncut_tiles, last_parts = 0, 0, 0, 0
    for first in range(0, num_rows, ROWS):
        # [ROWS]
        row = first + tl.arange(0, ROWS)
        length, kv_length = load_lengths(lengths_ptr, kv_ptr, first, num_rows, key_start, ROWS)
        start = tl.load(starts_ptr + row, mask=row < num_rows, other=0)
        tiles, blocks = work(length, kv_length, window, TILE_TOKENS, BLOCK_KEYS)
        equal, last, part = parts_of(blocks, part_blocks, fixed)
        whole = (equal == 0) & (last == 0)
        # In the order of rows, and of tiles in a row: where the row's first are.
        tile = all_tiles + _sum_before(tiles)
        first_place = equal_parts + _sum_before(equal * tiles)
        uncut = uncut_tiles + _sum_before(tl.where(whole, tiles, 0))
        last_place = last_parts + _sum_before(last * tiles)
        most = tl.reduce(tiles, 0, tl.standard._elementwise_max)
        most_parts = tl.reduce(equal, 0, tl.standard._elementwise_max)
        for index in range(program, most, tile_programs):
            there = index < tiles
            skipped = index * TILE_TOKENS
            tokens = tl.minimum(length - skipped, TILE_TOKENS)
            seen = kv_length - length + 1 + skipped
            keys = tl.minimum(tl.maximum(seen + tokens - 1, 0), window)
            # Tiles of a row are cut at the same keys; one may see the first part only.
            part_keys = tl.where(whole, tl.maximum(keys, 1), part * BLOCK_KEYS)
            alone = keys <= part_keys
            place = first_place + index * equal
            place_of_last = all_equal + last_place + index

            entry = tile_table_ptr + (tile + index) * TABLE_COLUMNS
            _store(
                entry, there, start + skipped, tokens, keys, part_keys, place, equal, place_of_last
            )
            for one in range(0, most_parts, PARTS):
                # [ROWS, PARTS]
                number = one + tl.arange(0, PARTS)[None, :]
                begin = number * part_keys[:, None]
                end = tl.minimum((number + 1) * part_keys[:, None], keys[:, None])
                _store(
                    table_ptr + (place[:, None] + number) * TABLE_COLUMNS,
                    there[:, None] & (number < equal[:, None]),
                    row[:, None],
                    start[:, None] + skipped,
                    _tokens_of_part(tokens[:, None], begin, end),
                    seen[:, None],
                    begin,
                    end,
                    tl.where(alone[:, None], -1, place[:, None] + number),
                )
            # The only part of a row, or the last one if it is shorter: those from the end on.
            own = tl.where(whole, all_equal + uncut, num_tiles + more - 1 - last_place)
            begin = equal * part_keys
            end = tl.minimum(begin + part_keys, keys)
            _store(
                table_ptr + (own + tl.where(whole, index, -index)) * TABLE_COLUMNS,
                there & (whole | (last > 0)),
                row,
                start + skipped,
                _tokens_of_part(tokens, begin, end),
                seen,
                begin,
                end,
                tl.where(whole | alone, -1, place_of_last),
            )
        all_tiles += tl.reduce(tiles, 0, tl.standard._sum_combine)
        equal_parts += tl.reduce(equal * tiles, 0, tl.standard._sum_combine)
        uncut_tiles += tl.reduce(tl.where(whole, tiles, 0), 0, tl.standard._sum_combine)
        last_parts += tl.reduce(last * tiles, 0, tl.standard._sum_combine)
    _clear(table_ptr + 2, equal_parts + uncut_tiles, num_tiles + more - last_parts, ROWS)
    _clear(tile_table_ptr + 1, all_tiles, num_tiles, ROWS)


@triton.jit
def _clear(column_ptr, begin, end, ROWS: tl.constexpr):
    """Write that entries have no tokens."""
    for first in range(begin, end, ROWS):
        entry = first + tl.arange(0, ROWS)
        tl.store(column_ptr + entry * TABLE_COLUMNS, 0, mask=entry < end)


@triton.jit
def _sum_before(values):
    """Of the elements before each."""
    return tl.associative_scan(values, 0, tl.standard._sum_combine) - values


@triton.jit
def _tokens_of_part(tokens, begin, end):
    """None where a tile sees nothing of a part; the first part writes what it gets without keys."""
    return tl.where((begin > 0) & (begin >= end), 0, tokens)


@triton.jit
def _store(entry, mask, first, second, third, fourth, fifth, sixth, seventh):
    """Entries of a table, column by column."""
    tl.store(entry, first, mask=mask)
    tl.store(entry + 1, second, mask=mask)
    tl.store(entry + 2, third, mask=mask)
    tl.store(entry + 3, fourth, mask=mask)
    tl.store(entry + 4, fifth, mask=mask)
    tl.store(entry + 5, sixth, mask=mask)
    tl.store(entry + 6, seventh, mask=mask)


@triton.jit
def _clear_if_in_no_row(
    starts_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    token,
    heads,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    members = 0
    for first in range(0, num_rows, ROWS):
        index = first + tl.arange(0, ROWS)
        there = index < num_rows
        start = tl.load(starts_ptr + index, mask=there, other=0)
        length = tl.load(lengths_ptr + index, mask=there, other=0)
        member = (token >= start) & (token < start + length)
        members += tl.reduce(member.to(tl.int32), 0, tl.standard._sum_combine)
    if members == 0:
        for head in range(heads):
            row = token.to(tl.int64) * heads + head
            nothing = narrow(tl.full([C], 0.0, tl.float32), out_ptr.dtype.element_ty, INTERPRETED)
            tl.store(out_ptr + row * C + tl.arange(0, C), nothing)
            tl.store(lse_ptr + row, float("-inf"))
