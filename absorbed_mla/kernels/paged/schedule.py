"""Which program attends from which tokens to which keys, made on the device from the rows' tables.

A tile is some tokens of one row of the batch. The keys of a row are cut into parts, equal but for
the last, where the device would be idle otherwise (part_size.py). A program takes a part of a tile;
programs begin in the order of their table, where equal parts, the longest, come first. Two tables:

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

from absorbed_mla.kernels.paged.part_size import blocks_of_a_part, work_of_rows
from absorbed_mla.kernels.paged.plan import Cut, Tiles
from absorbed_mla.kernels.portable.common import narrow

TABLE_COLUMNS = tl.constexpr(8)
_TILES_PER_PROGRAM = 16
_ROWS_AT_A_TIME = 128


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
    tile_programs = triton.cdiv(tiles.most, _TILES_PER_PROGRAM)
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
        TILES=_TILES_PER_PROGRAM,
        ROWS=_ROWS_AT_A_TIME,
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
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
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
    part_blocks = window // BLOCK_KEYS + 1
    if (more > 0) & (fixed == 0):
        part_blocks = blocks_of_a_part(
            lengths_ptr,
            kv_ptr,
            num_rows,
            key_start,
            window,
            more,
            at_a_time,
            least,
            head_blocks,
            TILE_TOKENS,
            BLOCK_KEYS,
            ROWS,
        )

    # [TILES]
    tile = program * TILES + tl.arange(0, TILES)
    row = tl.full([TILES], 0, tl.int32)  # rows whose tiles all come before
    before = tl.full(
        [TILES], 0, tl.int32
    )  # their tiles; their equal parts, uncut tiles, last parts
    equal_before = tl.full([TILES], 0, tl.int32)
    uncut_before = tl.full([TILES], 0, tl.int32)
    last_before = tl.full([TILES], 0, tl.int32)
    counted, all_equal, all_uncut, all_last = 0, 0, 0, 0
    for first in range(0, num_rows, ROWS):
        # [ROWS]
        there = first + tl.arange(0, ROWS) < num_rows
        tiles, blocks = work_of_rows(
            lengths_ptr, kv_ptr, first, num_rows, key_start, window, TILE_TOKENS, BLOCK_KEYS, ROWS
        )
        equal, last, part = _parts(blocks, part_blocks, fixed)
        uncut = tl.where((equal == 0) & (last == 0), tiles, 0)
        up_to = counted + tl.associative_scan(tiles, 0, tl.standard._sum_combine)
        # [TILES, ROWS]
        past = (up_to[None, :] <= tile[:, None]) & there[None, :]
        row += tl.reduce(past.to(tl.int32), 1, tl.standard._sum_combine)
        before = tl.maximum(before, _greatest(up_to, past))
        equal_before += _sum(equal * tiles, past)
        uncut_before += _sum(uncut, past)
        last_before += _sum(last * tiles, past)
        counted += tl.reduce(tiles, 0, tl.standard._sum_combine)
        all_equal += tl.reduce(equal * tiles, 0, tl.standard._sum_combine)
        all_uncut += tl.reduce(uncut, 0, tl.standard._sum_combine)
        all_last += tl.reduce(last * tiles, 0, tl.standard._sum_combine)

    found = (row < num_rows) & (tile < num_tiles)
    index = tile - before  # in the row
    skipped = index * TILE_TOKENS
    length = tl.load(lengths_ptr + row, mask=found, other=0)
    kv_length = tl.load(kv_ptr + row, mask=found, other=0) - key_start
    seen = kv_length - length + 1 + skipped
    tokens = tl.where(found, tl.minimum(length - skipped, TILE_TOKENS), 0)
    keys = tl.minimum(tl.maximum(seen + tokens - 1, 0), window)
    start = tl.load(starts_ptr + row, mask=found, other=0) + skipped
    # As for the whole row: its tiles are cut at the same keys.
    row_keys = tl.minimum(tl.maximum(kv_length, 0), window)
    equal, last, part = _parts((row_keys + BLOCK_KEYS - 1) // BLOCK_KEYS, part_blocks, fixed)
    whole = (equal == 0) & (last == 0)
    part_keys = tl.where(whole, tl.maximum(keys, 1), part * BLOCK_KEYS)
    first_place = equal_before + index * equal
    last_place = all_equal + last_before + index

    entry = tile_table_ptr + tile * TABLE_COLUMNS
    inside = tile < num_tiles
    tl.store(entry, start, mask=inside)
    tl.store(entry + 1, tokens, mask=inside)
    tl.store(entry + 2, keys, mask=inside)
    tl.store(entry + 3, part_keys, mask=inside)
    tl.store(entry + 4, first_place, mask=inside)
    tl.store(entry + 5, equal, mask=inside)
    tl.store(entry + 6, last_place, mask=inside)

    # A tile of a row that is cut may see the first part only.
    alone = keys <= part_keys
    most = tl.reduce(tl.where(found, equal, 0), 0, tl.standard._elementwise_max)
    for first in range(0, most, TILES):
        # [TILES, parts]
        number = first + tl.arange(0, TILES)[None, :]
        place = first_place[:, None] + number
        _store_program(
            table_ptr + place * TABLE_COLUMNS,
            found[:, None] & (number < equal[:, None]),
            row[:, None],
            start[:, None],
            tokens[:, None],
            seen[:, None],
            number * part_keys[:, None],
            tl.minimum((number + 1) * part_keys[:, None], keys[:, None]),
            tl.where(alone[:, None], -1, place),
        )
    # The only part of a row, or the last one if it is shorter.
    begin = equal * part_keys
    program = tl.where(whole, all_equal + uncut_before + index, all_uncut + last_place)
    _store_program(
        table_ptr + program * TABLE_COLUMNS,
        found & (whole | (last > 0)),
        row,
        start,
        tokens,
        seen,
        begin,
        tl.minimum(begin + part_keys, keys),
        tl.where(whole | alone, -1, last_place),
    )
    # No more programs are needed.
    needed, size = all_equal + all_uncut + all_last, num_tiles + more
    for first in range(needed + tl.program_id(0) * ROWS, size, tile_programs * ROWS):
        unused = first + tl.arange(0, ROWS)
        tl.store(table_ptr + unused * TABLE_COLUMNS + 2, 0, mask=unused < size)


@triton.jit
def _parts(blocks, size, fixed):
    """Equal parts of rows (none: a row is uncut), whether a shorter one follows, and their size."""
    part = tl.where(fixed > 0, tl.maximum((blocks + fixed - 1) // tl.maximum(fixed, 1), 1), size)
    cut = tl.where(fixed > 0, fixed > 1, blocks > size)
    equal = tl.where(cut, tl.where(fixed > 0, fixed, blocks // tl.maximum(part, 1)), 0)
    last = tl.where(cut & (fixed == 0) & (equal * part < blocks), 1, 0)
    return equal, last, part


@triton.jit
def _store_program(entry, mask, row, start, tokens, seen, begin, end, place):
    """An entry of the table of programs; parts that the tile sees nothing of have nothing to do."""
    tl.store(entry, row, mask=mask)
    tl.store(entry + 1, start, mask=mask)
    # The first part writes what tokens without keys get.
    tl.store(entry + 2, tl.where((begin > 0) & (begin >= end), 0, tokens), mask=mask)
    tl.store(entry + 3, seen, mask=mask)
    tl.store(entry + 4, begin, mask=mask)
    tl.store(entry + 5, end, mask=mask)
    tl.store(entry + 6, place, mask=mask)


@triton.jit
def _sum(values, which):
    """Of [ROWS], over those that ``which`` [TILES, ROWS] says."""
    return tl.reduce(tl.where(which, values[None, :], 0), 1, tl.standard._sum_combine)


@triton.jit
def _greatest(values, which):
    """Likewise the greatest; 0 if there are none."""
    return tl.reduce(tl.where(which, values[None, :], 0), 1, tl.standard._elementwise_max)


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
