"""Deterministic scatter-add: what keys get from all entries of lists, in a fixed order.

What the entries of some tiles get is written to a buffer of parts. A table says for every key and
tile where the tile's list has the key, if it has; of each key's column a short list of these places
is made, in the order of the tiles, and one program adds up its parts: the sum is the same in every
run, which sums by atomics are not, and the parts are read once. Parts of bf16 operands are rounded
to bf16 before they are added in fp32: with independent errors that is the error of one rounding of
the sum, and half of the memory traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.dsa.key_lists import KEY_MASK, KeyLists
from absorbed_mla.kernels.scratch import not_filled
from absorbed_mla.kernels.triton_private import sum_combine

# Of parts, table and places together. Few long runs: each ends with multiprocessors that wait.
_MOST_BYTES = 2**31
_THREADS = 128
# Entries of a list, keys that are filled, and tiles and keys of the table that a program has at a
# time; rows of parts that it asks for before it needs them.
_ENTRIES, _FILLED, _TILES, _KEYS, _ROWS = 1024, 4096, 32, 32, 16


def parts_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the parts that operands of this dtype give: fp16 has not the range of a gradient."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def add_in_order(
    total: Tensor,
    lists: KeyLists,
    head_blocks: int,
    dtype: torch.dtype,
    write: Callable[[slice, Tensor], None],
) -> None:
    """Add what all entries of the lists get to their keys, in the order of the tiles.

    Args:
        total: fp32 [S_k, B, W], contiguous, changed in place.
        lists: The keys.
        head_blocks: Parts of an entry.
        dtype: Of the parts.
        write: Given some tiles and [tiles * B * L * head_blocks, W], writes their parts there;
            where there is no key, nothing is read. Called once for every tile.
    """
    keys, batch, width = total.shape
    tiles, _, length = lists.entries.shape
    rows = batch * length * head_blocks
    # Short numbers where lists are short: the table is sparse and long.
    places = torch.int16 if length <= 2**15 else torch.int32
    of_tile = rows * width * dtype.itemsize + keys * batch * (places.itemsize + 4)
    most = tiles_at_a_time(tiles, of_tile, batch * head_blocks, total.device)
    with not_filled():
        parts = total.new_empty(most * rows, width, dtype=dtype)
        scratch = _Scratch(
            total.new_empty(most * batch * keys, dtype=places),
            total.new_empty(keys * batch * most, dtype=torch.int32),
            total.new_empty(keys * batch, dtype=torch.int32),
        )
    for first in range(0, tiles, most):
        some = slice(first, min(first + most, tiles))
        of_run = parts[: (some.stop - first) * rows]
        write(some, of_run)
        if total.numel() and of_run.numel():
            _add_run(total, of_run, lists, some, head_blocks, scratch)


def tiles_at_a_time(tiles: int, of_tile: int, programs: int, device: torch.device) -> int:
    """How many tiles a run has, at most: all, or as many as fit and occupy the GPU evenly.

    Args:
        tiles: How many there are.
        of_tile: Bytes that one needs.
        programs: That write the parts of one.
        device: Where.
    """
    most = max(1, _MOST_BYTES // max(1, of_tile))
    if most >= tiles:
        return max(1, tiles)
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    even = processors // math.gcd(processors, programs)
    return most // even * even or most


class _Scratch(NamedTuple):
    """Memory of all runs.

    Attributes:
        table: int16 or int32 [tiles, B, S_k], where the lists have the keys, -1 for nowhere.
        places: int32 [S_k, B, tiles]: of the entries of every key, by tile.
        counts: int32 [S_k, B], how many of these there are.
    """

    table: Tensor
    places: Tensor
    counts: Tensor


def _add_run(
    total: Tensor, parts: Tensor, lists: KeyLists, some: slice, head_blocks: int, scratch: _Scratch
) -> None:
    """Add the parts of some tiles."""
    keys, batch, width = total.shape
    entries, counts = lists.entries[some], lists.counts[some]
    tiles, _, length = entries.shape
    mask = KEY_MASK.value if lists.tokens > 1 else 2**31 - 1
    _table_kernel[(tiles, batch)](
        entries,
        counts,
        scratch.table,
        length,
        keys,
        MASK=mask,
        ENTRIES=_ENTRIES,
        FILLED=_FILLED,
        num_warps=_THREADS // 32,
    )
    _place_kernel[(triton.cdiv(keys, _KEYS), batch)](
        *scratch, tiles, keys, length, TILES=_TILES, KEYS=_KEYS, num_warps=1
    )
    # 576 columns are 512 and 64.
    main = 1 << (width.bit_length() - 1)
    rest = triton.next_power_of_2(width - main) if width > main else 0
    _sum_kernel[(keys * batch,)](
        total,
        parts,
        scratch.places,
        scratch.counts,
        tiles,
        WIDTH=width,
        MAIN=main,
        REST=rest,
        MAIN_ROWS=_rows_at_once(main, parts),
        REST_ROWS=_rows_at_once(rest, parts),
        ROWS=_ROWS,
        BLOCKS=head_blocks,
        num_warps=_THREADS // 32,
    )


def _rows_at_once(columns: int, parts: Tensor) -> int:
    """Rows that all threads read at a time, 16 bytes each: a thread adds up every so many."""
    return min(_ROWS, max(1, _THREADS * 16 // max(1, columns * parts.itemsize)))


@triton.jit
def _table_kernel(
    entries_ptr,
    counts_ptr,
    table_ptr,
    length,
    keys,
    MASK: tl.constexpr,
    ENTRIES: tl.constexpr,
    FILLED: tl.constexpr,
):
    """The row of one list."""
    number = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    entries_ptr += number.to(tl.int64) * length
    table_ptr += number.to(tl.int64) * keys
    nowhere = tl.full([FILLED], -1, table_ptr.dtype.element_ty)
    for start in range(0, keys, FILLED):
        key = start + tl.arange(0, FILLED)
        tl.store(table_ptr + key, nowhere, mask=key < keys)
    tl.debug_barrier()
    count = tl.load(counts_ptr + number)
    for start in range(0, count, ENTRIES):
        place = start + tl.arange(0, ENTRIES)
        entry = tl.load(entries_ptr + place, mask=place < count, other=-1)
        value = place.to(table_ptr.dtype.element_ty)
        tl.store(table_ptr + (entry & MASK), value, mask=entry >= 0)


@triton.jit
def _place_kernel(
    table_ptr, places_ptr, counts_ptr, tiles, keys, length, TILES: tl.constexpr, KEYS: tl.constexpr
):
    """The places of some keys' entries, without what is between them."""
    batch, batches = tl.program_id(1), tl.num_programs(1)
    key = (tl.program_id(0) * KEYS + tl.arange(0, KEYS)).to(tl.int64)
    row = key * batches + batch
    count = tl.full([KEYS], 0, tl.int32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        number = (tile * batches + batch)[:, None]
        mask = (tile < tiles)[:, None] & (key < keys)[None, :]
        place = tl.load(table_ptr + number.to(tl.int64) * keys + key[None, :], mask=mask, other=-1)
        there = (place >= 0).to(tl.int32)
        before = tl.associative_scan(there, 0, sum_combine) - there + count[None, :]
        place = number * length + place.to(tl.int32)
        tl.store(places_ptr + (row * tiles)[None, :] + before, place, mask=there > 0)
        count += tl.reduce(there, 0, sum_combine)
    tl.store(counts_ptr + row, count, mask=key < keys)


@triton.jit
def _sum_kernel(
    total_ptr,
    parts_ptr,
    places_ptr,
    counts_ptr,
    tiles,
    WIDTH: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    MAIN_ROWS: tl.constexpr,
    REST_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """All columns of one key: MAIN, and up to REST more."""
    key = tl.program_id(0).to(tl.int64)
    total_ptr += key * WIDTH
    places_ptr += key * tiles
    count = tl.load(counts_ptr + key) * BLOCKS
    main = tl.full([MAIN_ROWS, MAIN], 0.0, tl.float32)
    if REST:
        rest = tl.full([REST_ROWS, REST], 0.0, tl.float32)
    row = _rows(places_ptr, 0, count, ROWS, BLOCKS)
    for start in range(0, count, ROWS):
        part = _load(parts_ptr, row, 0, WIDTH, MAIN)
        if REST:
            more = _load(parts_ptr, row, MAIN, WIDTH, REST)
        # While the parts come.
        row = _rows(places_ptr, start + ROWS, count, ROWS, BLOCKS)
        main += _folded(part, MAIN_ROWS)
        if REST:
            rest += _folded(more, REST_ROWS)
    if count > 0:
        _add(total_ptr, main, 0, WIDTH)
        if REST:
            _add(total_ptr, rest, MAIN, WIDTH)


@triton.jit
def _rows(places_ptr, start, count, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Rows of a key's parts from a number on, -1 beyond the last."""
    index = start + tl.arange(0, ROWS)
    place = tl.load(places_ptr + index // BLOCKS, mask=index < count, other=0)
    return tl.where(index < count, place * BLOCKS + index % BLOCKS, -1)


@triton.jit
def _load(parts_ptr, row, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of rows, zeros where there is none."""
    column = FIRST + tl.arange(0, COLUMNS)
    mask = (row >= 0)[:, None]
    if FIRST + COLUMNS > WIDTH:
        mask = mask & (column < WIDTH)[None, :]
    offset = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    return tl.load(parts_ptr + offset, mask=mask, other=0.0)


@triton.jit
def _folded(part, AT_ONCE: tl.constexpr):
    """Sums of the rows that a thread has, [AT_ONCE, columns]."""
    FOLDS: tl.constexpr = part.shape[0] // AT_ONCE
    part = tl.reshape(part.to(tl.float32), [FOLDS, AT_ONCE, part.shape[1]])
    return tl.reduce(part, 0, sum_combine)


@triton.jit
def _add(total_ptr, rows, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Add the rows to some columns."""
    column = FIRST + tl.arange(0, rows.shape[1])
    found = tl.load(total_ptr + column, mask=column < WIDTH, other=0.0)
    found += tl.reduce(rows, 0, sum_combine)
    tl.store(total_ptr + column, found, mask=column < WIDTH)
