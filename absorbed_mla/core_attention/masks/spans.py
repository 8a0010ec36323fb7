"""Which query tokens may see which key tokens, in plain integers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from absorbed_mla.caching import DerivedTables
from absorbed_mla.prefix_tree import PrefixTree
from absorbed_mla.sequences import SequenceLayout

# First token and number of tokens of a sequence on an axis.
Run = tuple[int, int]


@dataclass(frozen=True)
class Span:
    """A run of query tokens and the run of key tokens they may see, both of one sequence.

    Attributes:
        query_start: First token on the query axis.
        query_end: One past the last.
        key_start: First token on the key axis.
        key_end: One past the last.
        causal_offset: Query i of the span sees its keys 0 .. i + causal_offset; None for all keys.
    """

    query_start: int
    query_end: int
    key_start: int
    key_end: int
    causal_offset: int | None

    @property
    def queries(self) -> slice:
        """The queries on their axis."""
        return slice(self.query_start, self.query_end)

    @property
    def keys(self) -> slice:
        """The keys on their axis."""
        return slice(self.key_start, self.key_end)

    @property
    def num_queries(self) -> int:
        """Number of query tokens."""
        return self.query_end - self.query_start

    @property
    def num_keys(self) -> int:
        """Number of key tokens."""
        return self.key_end - self.key_start

    @property
    def num_pairs(self) -> int:
        """Number of pairs of a query and a key that it sees."""
        queries, keys, offset = self.num_queries, self.num_keys, self.causal_offset
        if offset is None:
            return queries * keys

        def triangle(rows: int) -> int:
            return max(rows, 0) * (rows + 1) // 2

        beyond = triangle(offset + queries - keys) - triangle(offset - keys)
        return triangle(offset + queries) - triangle(offset) - beyond

    def within_queries(self, start: int, end: int) -> Span:
        """The span restricted to queries ``start`` to ``end``, and to the keys that those see.

        The range must lie within the span's queries.
        """
        if self.causal_offset is None:
            return replace(self, query_start=start, query_end=end)
        offset = self.causal_offset + start - self.query_start
        key_end = min(self.key_end, self.key_start + offset + end - start)
        return Span(start, end, self.key_start, key_end, offset)


class Spans(tuple[Span, ...]):
    """The spans of one attention call. A query is in at most one of them.

    Attributes:
        further: Spans of the same queries over other keys, for ``SharedPrefixBackend``.
        tables: What backends derive from these spans, such as tables of integers on the device.
            All layers read the same spans, so each table is made once.
    """

    further: tuple[Spans, ...]
    tables: DerivedTables

    def __new__(cls, spans=(), further: tuple[Spans, ...] = ()) -> Spans:
        """Make spans of any iterable; spans themselves are returned as they are."""
        if isinstance(spans, cls):
            return spans
        made = super().__new__(cls, spans)
        made.further = further
        made.tables = DerivedTables()
        return made

    def chunks(self, num_queries: int) -> Iterator[Span]:
        """The spans, cut into parts of at most ``num_queries`` queries."""
        for span in self:
            for first in range(span.query_start, span.query_end, num_queries):
                yield span.within_queries(first, min(first + num_queries, span.query_end))

    def cover(self, num_queries: int) -> bool:
        """Whether every one of ``num_queries`` queries is in a span."""
        return (
            self.tables.get("num_queries", lambda: sum(span.num_queries for span in self))
            == num_queries
        )


def self_attention_spans(layout: SequenceLayout, causal: bool) -> Spans:
    """Every sequence over itself and its prefixes, where queries and keys share one axis."""
    offset = 0 if causal else None

    def make() -> Spans:
        own = (Span(start, end, start, end, offset) for start, end in layout.segments())
        return with_prefixes(own, layout.tree, layout.runs(), layout.runs())

    return layout.tables.get(("self-attention", causal), make)


def with_prefixes(
    own: Iterable[Span], tree: PrefixTree | None, queries: Sequence[Run], keys: Sequence[Run]
) -> Spans:
    """The spans ``own`` of single nodes; as ``further`` ones what nodes see of those above them.

    A query has one node of each depth above it, so there are spans for each depth.

    Args:
        own: What nodes see of themselves.
        tree: None where every sequence is whole.
        queries: Of each node, without padding.
        keys: Likewise.
    """
    if tree is None:
        return Spans(own)
    levels: list[list[Span]] = [[] for _ in range(max(tree.depths))]
    for node, (key, num_keys) in enumerate(keys):
        if num_keys:
            for first, end in _joined(queries[node + 1 : tree.subtree_ends[node]]):
                levels[tree.depths[node]].append(Span(first, end, key, key + num_keys, None))
    return Spans(own, tuple(Spans(level) for level in levels if level))


def _joined(runs: Sequence[Run]) -> list[list[int]]:
    """First and one past the last token of runs, those without a gap between them as one."""
    found: list[list[int]] = []
    for start, count in runs:
        if found and found[-1][1] == start:
            found[-1][1] += count
        elif count:
            found.append([start, start + count])
    return found
