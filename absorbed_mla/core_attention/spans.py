"""Which query tokens may see which key tokens, in plain integers."""

from __future__ import annotations

from collections.abc import Iterable
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

    def within_keys(self, start: int, end: int) -> Span | None:
        """The part on keys ``start`` to ``end`` of the axis, or None if no query sees any of them.

        Queries that see none of the keys are left out; the key axis stays as it was.
        """
        first, last = max(self.key_start, start), min(self.key_end, end)
        if first >= last or self.query_start >= self.query_end:
            return None
        if self.causal_offset is None:
            return replace(self, key_start=first, key_end=last)
        offset = self.causal_offset - (first - self.key_start)
        blind = max(-offset, 0)
        query_start, offset = self.query_start + blind, offset + blind
        if query_start >= self.query_end:
            return None
        # The first query sees everything already.
        causal_offset = None if offset >= last - first - 1 else offset
        return Span(query_start, self.query_end, first, last, causal_offset)

    def shift_keys(self, by: int) -> Span:
        """The same span on a key axis that begins ``by`` tokens earlier."""
        return replace(self, key_start=self.key_start + by, key_end=self.key_end + by)


def self_attention_spans(layout: SequenceLayout, causal: bool) -> tuple[Span, ...]:
    """Every sequence over itself, where queries and keys share one axis."""
    offset = 0 if causal else None
    return tuple(Span(start, end, start, end, offset) for start, end in layout.segments())


def key_window(spans: Iterable[Span], start: int, end: int) -> tuple[Span, ...]:
    """The spans on a key axis that holds only tokens ``start`` to ``end`` of the old one."""
    cut = (span.within_keys(start, end) for span in spans)
    return tuple(span.shift_keys(-start) for span in cut if span is not None)
