"""Which query sees which key, as tables of integers with one row for each piece of a kernel's work.

Both tables are int32 on the CPU; whoever launches a kernel moves them to its device and keeps them.
With ``length`` a table covers its whole axis, so a kernel may write into uninitialised memory: what
lies in no span is in rows that see nothing. The longest rows come first: a GPU starts blocks in
order, and short ones last leave less of it idle at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from absorbed_mla.core_attention.masks.spans import Span

# The offset of a tile where every query sees every key: kernels compare with it to skip the mask.
SEES_ALL = 2**30


def query_tiles(spans: Iterable[Span], tokens: int, length: int | None = None) -> Tensor:
    """Cut spans into tiles of at most ``tokens`` queries and the keys that they see.

    A row is (query_start, query_end, key_start, key_end, offset). Query q of it sees key k exactly
    where key_start <= k < key_end and k - key_start <= q - query_start + offset. The offset is
    ``SEES_ALL`` where this holds for all pairs; no pair is visible where key_end == key_start.

    Args:
        spans: A query is in at most one of them.
        tokens: Most queries in a tile.
        length: Of the query axis; queries in no span then come in tiles without keys, so that every
            query is in exactly one tile. None leaves them out.

    Returns:
        int32 [tiles, 5], those with the most keys first.
    """
    table = _table(spans)
    if length is not None:
        table = torch.cat((table, _gaps(table[:, :2], length)))
    row, part = _parts(table[:, 1] - table[:, 0], tokens)
    start, end, key_start, key_end, offset = table[row].unbind(1)
    start = start + part * tokens
    end = torch.minimum(start + tokens, end)
    # 2**30 plus the length of an axis is still far from the limit of int64, and is cut below.
    offset = offset + part * tokens
    seen = (offset + end - start).clamp(min=0)
    key_end = torch.minimum(key_start + seen, key_end).maximum(key_start)
    offset = _cut_offset(offset, key_end - key_start)
    return _longest_first((start, end, key_start, key_end, offset), key_end - key_start)


def key_tiles(spans: Iterable[Span], tokens: int, length: int | None = None) -> Tensor:
    """Cut spans into tiles of at most ``tokens`` keys and the queries that see any of them.

    A row is (key_start, key_end, query_start, query_end, offset, layer). Key k of it is seen by
    query q exactly where query_start <= q < query_end and
    k - key_start <= q - query_start + offset. The offset is ``SEES_ALL`` where this holds for all
    pairs; no pair is visible where query_end == query_start.

    Spans may share keys, hence rows do; the sum over them is left to the kernel. Rows of one
    ``layer`` share no key: a kernel that gives each layer a buffer of its own needs no atomics, and
    adds up layers (one unless spans share keys) afterwards.

    Args:
        spans: Any number of them may see a key.
        tokens: Most keys in a tile.
        length: Of the key axis; keys in no span then come in tiles without queries, so that every
            key is in exactly one tile of every layer. None leaves them out.

    Returns:
        int32 [tiles, 6], those with the most queries first.
    """
    table = _table(spans)
    visible = (table[:, 0] < table[:, 1]) & (table[:, 2] < table[:, 3])
    table = table[visible]
    layer = _layers(table[:, 2].tolist(), table[:, 3].tolist())
    table = torch.cat((table, torch.tensor(layer, dtype=torch.int64)[:, None]), dim=1)
    if length is not None:
        # At least one layer: the kernel's result is made from it even if no key is seen.
        for index in range(max(layer, default=0) + 1):
            gaps = _gaps(table[table[:, 5] == index, 2:4], length)[:, [2, 3, 0, 1, 4]]
            table = torch.cat((table, torch.nn.functional.pad(gaps, (0, 1), value=index)))
    row, part = _parts(table[:, 3] - table[:, 2], tokens)
    query_start, query_end, start, end, offset, layers = table[row].unbind(1)
    start = start + part * tokens
    end = torch.minimum(start + tokens, end)
    offset = offset - part * tokens
    blind = (-offset).clamp(min=0)
    query_start = torch.minimum(query_start + blind, query_end)
    offset = _cut_offset(offset + blind, end - start)
    columns = (start, end, query_start, query_end, offset, layers)
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


def _gaps(covered: Tensor, length: int) -> Tensor:
    """What disjoint ranges [n, 2] leave of an axis, as spans [gaps, 5] that see nothing."""
    covered = covered[covered[:, 0].argsort()]
    start = torch.nn.functional.pad(covered[:, 1], (1, 0), value=0)
    end = torch.nn.functional.pad(covered[:, 0], (0, 1), value=length)
    left = start < end
    nothing = torch.zeros_like(start)
    gaps = torch.stack((start, end, nothing, nothing, torch.full_like(start, SEES_ALL)), dim=1)
    return gaps[left]


def _parts(lengths: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Row and number of every part that ranges of ``lengths`` are cut into."""
    counts = (lengths.clamp(min=0) + tokens - 1) // tokens
    row = torch.repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    return row, torch.arange(len(row)) - first[row]


def _layers(starts: list[int], ends: list[int]) -> list[int]:
    """The layer of every range, such that ranges of one layer are disjoint."""
    layers = [0] * len(starts)
    last: list[int] = []  # where the last range of every layer ends
    for index in sorted(range(len(starts)), key=starts.__getitem__):
        free = (i for i, end in enumerate(last) if end <= starts[index])
        layer = next(free, len(last))
        last[layer : layer + 1] = [ends[index]]
        layers[index] = layer
    return layers


def _cut_offset(offset: Tensor, keys: Tensor) -> Tensor:
    """The offset, or ``SEES_ALL`` where the first query sees the last of so many keys."""
    return torch.where(offset >= keys - 1, SEES_ALL, offset)


def _longest_first(columns: tuple[Tensor, ...], work: Tensor) -> Tensor:
    order = work.argsort(descending=True, stable=True)
    return torch.stack(columns, dim=1)[order].to(torch.int32)
