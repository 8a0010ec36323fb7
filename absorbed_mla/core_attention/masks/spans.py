"""Which query tokens may see which key tokens, in plain integers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from absorbed_mla.sequences import SequenceLayout


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

    def within_queries(self, start: int, end: int) -> Span:
        """The part of queries ``start`` to ``end`` of the axis, without keys that none of it sees.

        The range must lie within the span's.
        """
        if self.causal_offset is None:
            return replace(self, query_start=start, query_end=end)
        offset = self.causal_offset + start - self.query_start
        key_end = min(self.key_end, self.key_start + offset + end - start)
        return Span(start, end, self.key_start, key_end, offset)


@functools.lru_cache(maxsize=64)
def self_attention_spans(layout: SequenceLayout, causal: bool) -> tuple[Span, ...]:
    """Every sequence over itself, where queries and keys share one axis."""
    offset = 0 if causal else None
    return tuple(Span(start, end, start, end, offset) for start, end in layout.segments())
