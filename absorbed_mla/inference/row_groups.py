"""The row groups of a step: which rows run absorbed, which expanded, and the keys of the latter.

Rows that run expanded have many new tokens: their keys are the new tokens' own, then the cached
ones in chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from absorbed_mla.caching import DerivedTables
from absorbed_mla.core_attention.cost import Rated, Work, seconds
from absorbed_mla.core_attention.key_source import KeyBlock
from absorbed_mla.core_attention.masks.spans import Span, Spans, self_attention_spans
from absorbed_mla.dims import MLADims
from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import CachePart, RowLengths
from absorbed_mla.sequences import SequenceLayout


@dataclass(frozen=True)
class Segment:
    """Neighbouring rows that run in one form.

    Attributes:
        form: ``"absorbed"`` or ``"expanded"``.
        rows: Which rows of the step.
        tokens: Their new tokens on the token axis.
    """

    form: str
    rows: slice
    tokens: slice


# All rows and tokens of a step; also where their lengths are not known on the host.
ALL_ABSORBED = Segment("absorbed", slice(None), slice(None))


def is_cheaper_expanded(
    dims: MLADims,
    absorbed: Rated,
    expanded: Rated,
    machine: str,
    lengths: tuple[int, int],
    window: int | None = None,
) -> bool:
    """Whether a row takes less time expanded than absorbed, by the cost model.

    Args:
        dims: Of the layer on this rank.
        absorbed: Backend of the absorbed form.
        expanded: Backend of the expanded form.
        machine: See ``cost.seconds``.
        lengths: New tokens and keys of the row.
        window: Keys that a token sees; None for all before it.
    """
    queries, keys = lengths
    pairs = queries * keys - queries * (queries - 1) // 2
    if window is not None:
        keys, pairs = min(keys, queries + window - 1), min(pairs, queries * window)
    work = Work(query_tokens=queries, key_tokens=keys, pairs=pairs, training=False)
    return seconds("expanded", expanded, dims, work, machine) < seconds(
        "absorbed", absorbed, dims, work, machine
    )


def segments(
    lengths: RowLengths, expands: Callable[[tuple[int, int]], bool]
) -> tuple[Segment, ...]:
    """Group neighbouring rows of one form.

    Rows with one new token run absorbed: to project all keys for one query saves nothing.

    Args:
        lengths: Of all rows.
        expands: Whether a row of (new tokens, keys), more than one of both, runs expanded.
    """
    each = zip(lengths.queries, lengths.keys)
    expanded = [queries > 1 and expands((queries, keys)) for queries, keys in each]
    runs, row, token = [], 0, 0
    for form, group in itertools.groupby(expanded):
        end = row + len(list(group))
        last = token + sum(lengths.queries[row:end])
        name = "expanded" if form else "absorbed"
        runs.append(Segment(name, slice(row, end), slice(token, last)))
        row, token = end, last
    return tuple(runs)


def rows_of(rows: Rows, segment: Segment, lengths: RowLengths) -> Rows:
    """The segment's rows, on its own token axis."""
    chosen, first = segment.rows, segment.tokens.start
    if chosen == slice(0, len(rows)):
        return rows
    starts = rows.query_starts[chosen]
    return Rows(
        query_starts=starts - first if first else starts,
        query_lengths=rows.query_lengths[chosen],
        kv_lengths=rows.kv_lengths[chosen],
        block_table=rows.block_table[chosen],
        max_query_length=max(lengths.queries[chosen]),
        max_kv_length=max(lengths.keys[chosen]),
    )


@dataclass(frozen=True)
class KeyRange:
    """Keys of one row at positions ``start`` to ``end``."""

    row: int
    start: int
    end: int


@dataclass(frozen=True)
class QueryRun:
    """Neighbouring new tokens of one row.

    Attributes:
        row: The row.
        start: The first of them among the row's new tokens.
        first: Its place on the query axis.
        end: One past the place of the last.
    """

    row: int
    start: int
    first: int
    end: int

    def over(self, key_start: int, key_end: int, offset: int | None) -> Span:
        """These queries over some keys; ``offset``: of the row's first new token, or None."""
        offset = None if offset is None else offset + self.start
        return Span(self.first, self.end, key_start, key_end, offset)


class ChunkedContext:
    """A ``core_attention.key_source.KeySource`` of some neighbouring rows.

    The first block holds the latents of the new tokens, as the cache has them. The context, which
    was cached before them, is gathered from the cache a bounded number of tokens at a time, so that
    the workspace of the expanded form does not grow with it. If all keys together stay within a
    bound, they are gathered into one block, new tokens included, and nothing needs to be merged.

    Args:
        lengths: Of these rows.
        first_row: Number of the first of these rows in the step.
        parts: Returns the parts of the cache, of all rows, up to a position.
        chunk_size: Tokens gathered at a time.
        max_joined: Most keys that are gathered into one block with the new tokens.
        windowed: Whether there may be several parts.
        fp8: Reads the rows of the cache; None if they are latents as the model computed them.
        runs: Which of the rows' new tokens there are queries of, one after the other on the query
            axis; None: all. Chunks of context are the same for any runs.
        tables: For spans of gathered keys, shared by layers of the same lengths and runs.
        window: Keys that a token sees, itself included; older context is not gathered.
    """

    def __init__(
        self,
        lengths: RowLengths,
        first_row: int,
        parts: Callable[[int], Iterator[CachePart]],
        chunk_size: int,
        max_joined: int,
        windowed: bool = False,
        fp8: Fp8Latents | None = None,
        runs: Sequence[slice] | None = None,
        tables: DerivedTables | None = None,
        window: int | None = None,
    ) -> None:
        self.window = window
        self.tables = DerivedTables() if tables is None else tables
        self.first_row = first_row
        self.fp8 = fp8
        self.parts = parts
        self.chunk_size = chunk_size
        queries = lengths.queries
        self.layout = SequenceLayout.pack(queries)
        self.context = tuple(k - q for q, k in zip(queries, lengths.keys))
        # The first key that a new token sees.
        self.first = tuple(0 if window is None else max(0, c - window + 1) for c in self.context)
        self.keys = lengths.keys
        self.num_keys = sum(self.keys) - sum(self.first)
        self.whole = runs is None
        all_tokens = [slice(0, sum(queries))]
        self.runs = tuple(_runs_by_row(self.layout, all_tokens if runs is None else runs))
        self.joined = not windowed and any(self.context) and self.num_keys <= max_joined

    @property
    def num_blocks(self) -> int:
        """The new tokens, and at least one chunk where anything was cached; or all together."""
        if self.joined:
            return 1
        return 1 + -(-(sum(self.context) - sum(self.first)) // self.chunk_size)

    def blocks(self, kv: Tensor, keep: bool) -> Iterator[KeyBlock]:
        """See :class:`KeySource`; the memory of a block is reused for the next one."""
        if self.joined:
            workspace = self._workspace(kv, self.num_keys)
            keys = zip(self.first, self.keys)
            ranges = [KeyRange(row, *both) for row, both in enumerate(keys)]
            part = next(self.parts(max(self.keys)))
            yield self._gathered(part, ranges, workspace, kv.dtype, causal=True)
            return
        own = kv if self.fp8 is None else self.fp8.rounded(kv)
        yield self._own_block(own)
        if self.context == self.first:
            return
        chunk = min(self.chunk_size, sum(self.context) - sum(self.first))
        workspace = self._workspace(kv, chunk)
        for part in self.parts(max(self.context)):
            for ranges in chunks(self.context, part.start, part.end, self.chunk_size, self.first):
                block = self._gathered(part, ranges, workspace, kv.dtype)
                if block.spans:
                    yield block

    def _own_block(self, kv: Tensor) -> KeyBlock:
        """The new tokens, up to the last one that a query may see."""
        if self.whole:
            return self._block(kv, self_attention_spans(self.layout, causal=True))
        spans = []
        for run in self.runs:
            start = self.layout.starts[run.row]
            spans.append(run.over(start, start + run.start + run.end - run.first, 0))
        end = max((span.key_end for span in spans), default=0)
        return self._block(kv[:end], Spans(spans))

    def _workspace(self, kv: Tensor, tokens: int) -> Tensor:
        """Memory for rows of the cache."""
        rows = kv if self.fp8 is None else self.fp8.like(kv)
        return rows.new_empty(tokens, *rows.shape[1:])

    def _gathered(
        self,
        part: CachePart,
        ranges: list[KeyRange],
        workspace: Tensor,
        dtype: torch.dtype,
        causal: bool = False,
    ) -> KeyBlock:
        """Cached keys in ``workspace``; with ``causal`` those of the new tokens are among them."""
        used = 0
        for keys in ranges:
            first = used
            used += keys.end - keys.start
            target = workspace[first:used, 0]
            part.gather(self.first_row + keys.row, keys.start, keys.end, target)
        found = workspace[:used]
        if self.fp8 is not None:
            found = self.fp8.decode(found, dtype)
        # Other layers find it, and with it the tables that kernels read.
        causal |= self.window is not None
        key = "gathered", self.first_row, causal, *ranges
        return self._block(found, self.tables.get(key, partial(self._spans, ranges, causal)))

    def _spans(self, ranges: list[KeyRange], causal: bool) -> Spans:
        """The queries over gathered keys of their rows."""
        spans, used = [], 0
        for keys in ranges:
            first = used
            used += keys.end - keys.start
            offset = self.context[keys.row] - keys.start if causal else None
            runs = [run for run in self.runs if run.row == keys.row]
            spans += [run.over(first, used, offset) for run in runs]
        return Spans(spans)

    def _block(self, kv: Tensor, spans: tuple[Span, ...]) -> KeyBlock:
        # Only masks and dropout need the tokens of the keys, and there are none here.
        return KeyBlock(kv, spans, lambda: torch.arange(len(kv), device=kv.device))


def _runs_by_row(layout: SequenceLayout, runs: Sequence[slice]) -> Iterator[QueryRun]:
    """Runs of tokens, cut at the ends of rows."""
    place = 0
    for run in runs:
        for row, (start, length) in enumerate(zip(layout.starts, layout.lengths)):
            first, last = max(run.start, start), min(run.stop, start + length)
            if first < last:
                yield QueryRun(row, first - start, place, place + last - first)
                place += last - first


def chunks(
    context: tuple[int, ...],
    start: int,
    end: int | None,
    chunk_size: int,
    oldest: Sequence[int] | None = None,
) -> Iterator[list[KeyRange]]:
    """Cut the context of all rows between two positions into chunks.

    Args:
        context: Cached tokens of each row.
        start: First position.
        end: One past the last, or None.
        chunk_size: Most tokens of a chunk.
        oldest: First position of each row; None: 0.

    Yields:
        The ranges of a chunk: at least one, and no two of the same row.
    """
    ranges: list[KeyRange] = []
    room = chunk_size
    for row, length in enumerate(context):
        first = start if oldest is None else max(start, oldest[row])
        last = length if end is None else min(length, end)
        while first < last:
            taken = min(room, last - first)
            ranges.append(KeyRange(row, first, first + taken))
            first, room = first + taken, room - taken
            if not room:
                yield ranges
                ranges, room = [], chunk_size
    if ranges:
        yield ranges
