"""Tile tables: which query sees which key, one row of integers for each thread block of a kernel.

Both tables are int32 on the CPU; the backend that launches the kernel moves them to the device.
With ``length`` a table covers its whole axis: tokens in no span are in tiles that see nothing, so
every row of a kernel's output is written. With ``window`` a query sees the last so many keys up to
its own position: a kernel that gets the same number hides the older ones in a tile, whose offset is
then that of positions also where every query sees every key. Tiles with the most work come first: a
GPU starts thread blocks in order, and short ones at the end leave less of it idle.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Span

# The offset of a tile where every query sees every key: kernels compare with it to skip the mask.
SEES_ALL = 2**30


def query_tiles(
    spans: Iterable[Span], tokens: int, length: int | None = None, window: int | None = None
) -> Tensor:
    """Cut spans into tiles of at most ``tokens`` queries and the keys that they see.

    A row is (query_start, query_end, key_start, key_end, offset). Query q of it sees key k exactly
    where key_start <= k < key_end and k - key_start <= q - query_start + offset. The offset is
    ``SEES_ALL`` where this holds for all pairs; no pair is visible where key_end == key_start.

    Args:
        spans: A query is in at most one of them.
        tokens: Most queries in a tile.
        length: Of the query axis; queries in no span then come in tiles without keys, so that every
            query is in exactly one tile. None leaves them out.
        window: Keys up to its own position that a query sees: it also needs
            k - key_start > q - query_start + offset - window. Every span then has an offset. Keys
            older than those of a tile's first query are not in the tile, so the oldest key of each
            of its queries is among the first ``tokens``.

    Returns:
        int32 [tiles, 5], those with the most keys first.
    """
    table = _table(spans)
    if length is not None:
        table = torch.cat((table, _outside(table[:, :2], length)))
    row, part = _cut(table[:, 1] - table[:, 0], tokens)
    start, end, key_start, key_end, offset = table[row].unbind(1)
    start = start + part * tokens
    end = torch.minimum(start + tokens, end)
    # 2**30 plus the length of an axis is still far from the limit of int64, and is cut below.
    offset = offset + part * tokens
    seen = (offset + end - start).clamp(min=0)
    key_end = torch.minimum(key_start + seen, key_end).maximum(key_start)
    if window is None:
        offset = _cut_offset(offset, key_end - key_start)
    else:
        too_old = torch.minimum((offset - window + 1).clamp(min=0), key_end - key_start)
        key_start, offset = key_start + too_old, offset - too_old
    return _longest_first((start, end, key_start, key_end, offset), key_end - key_start)


def key_tiles(
    spans: Iterable[Span], tokens: int, length: int | None = None, window: int | None = None
) -> Tensor:
    """Cut spans into tiles of at most ``tokens`` keys and the queries that see any of them.

    A row is (key_start, key_end, query_start, query_end, offset, buffer). Key k of it is seen by
    query q exactly where query_start <= q < query_end and
    k - key_start <= q - query_start + offset. The offset is ``SEES_ALL`` where this holds for all
    pairs; no pair is visible where query_end == query_start.

    Spans may share keys, and then several tiles add to the gradient of one key. Tiles of one
    ``buffer`` share no key: a kernel that writes each buffer's tiles to memory of their own needs
    no atomics, and adds up the buffers (one unless spans share keys) afterwards.

    Args:
        spans: Any number of them may see a key.
        tokens: Most keys in a tile.
        length: Of the key axis; keys in no span then come in tiles without queries, so that every
            key is in exactly one tile of every buffer. None leaves them out.
        window: As in :func:`query_tiles`; queries that see none of a tile's keys any more are not
            in the tile.

    Returns:
        int32 [tiles, 6], those with the most queries first.
    """
    table = _table(spans)
    visible = (table[:, 0] < table[:, 1]) & (table[:, 2] < table[:, 3])
    table = table[visible]
    buffer = _buffers(table[:, 2].tolist(), table[:, 3].tolist())
    table = torch.cat((table, torch.tensor(buffer, dtype=torch.int64)[:, None]), dim=1)
    if length is not None:
        # At least one buffer: the kernel's result is made from it even if no key is seen.
        for index in range(max(buffer, default=0) + 1):
            between = _outside(table[table[:, 5] == index, 2:4], length)[:, [2, 3, 0, 1, 4]]
            table = torch.cat((table, torch.nn.functional.pad(between, (0, 1), value=index)))
    row, part = _cut(table[:, 3] - table[:, 2], tokens)
    query_start, query_end, start, end, offset, buffers = table[row].unbind(1)
    start = start + part * tokens
    end = torch.minimum(start + tokens, end)
    offset = offset - part * tokens
    if window is not None:
        last = query_start + (end - start - 1 - offset + window).clamp(min=0)
        query_end = torch.minimum(query_end, last)
    blind = (-offset).clamp(min=0)
    query_start = torch.minimum(query_start + blind, query_end)
    offset = offset + blind
    if window is None:
        offset = _cut_offset(offset, end - start)
    columns = (start, end, query_start, query_end, offset, buffers)
    return _longest_first(columns, query_end - query_start)


def _table(spans: Iterable[Span]) -> Tensor:
    """The spans' integers, int64 [spans, 5]."""
    rows = [
        (
            span.query_start,
            span.query_end,
            span.key_start,
            span.key_end,
            SEES_ALL if span.causal_offset is None else span.causal_offset,
        )
        for span in spans
    ]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 5)


def _outside(covered: Tensor, length: int) -> Tensor:
    """What disjoint ranges [n, 2] do not cover of an axis, as spans [m, 5] that see no key."""
    covered = covered[covered[:, 0].argsort()]
    start = torch.nn.functional.pad(covered[:, 1], (1, 0), value=0)
    end = torch.nn.functional.pad(covered[:, 0], (0, 1), value=length)
    left = start < end
    nothing = torch.zeros_like(start)
    between = torch.stack((start, end, nothing, nothing, torch.full_like(start, SEES_ALL)), dim=1)
    return between[left]


def _cut(lengths: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Cut ranges of ``lengths`` into tiles: the range of every tile, and its number within it."""
    counts = (lengths.clamp(min=0) + tokens - 1) // tokens
    row = torch.repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    return row, torch.arange(len(row)) - first[row]


def _buffers(starts: list[int], ends: list[int]) -> list[int]:
    """A buffer for every range, such that ranges of one buffer are disjoint."""
    buffers = [0] * len(starts)
    last: list[int] = []  # where the last range of every buffer ends
    for index in sorted(range(len(starts)), key=starts.__getitem__):
        free = (i for i, end in enumerate(last) if end <= starts[index])
        buffer = next(free, len(last))
        last[buffer : buffer + 1] = [ends[index]]
        buffers[index] = buffer
    return buffers


def _cut_offset(offset: Tensor, keys: Tensor) -> Tensor:
    """The offset, or ``SEES_ALL`` where the first query sees the last of ``keys`` keys."""
    return torch.where(offset >= keys - 1, SEES_ALL, offset)


def _longest_first(columns: tuple[Tensor, ...], work: Tensor) -> Tensor:
    order = work.argsort(descending=True, stable=True)
    return torch.stack(columns, dim=1)[order].to(torch.int32)
