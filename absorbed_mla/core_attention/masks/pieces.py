"""Cutting spans into what fused kernels know: full rectangles and causal squares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from absorbed_mla.core_attention.by_identity import cached_by_identity
from absorbed_mla.core_attention.masks.spans import Span


@dataclass(frozen=True)
class Piece:
    """Queries that see all of some keys, or as many keys as queries that see up to themselves.

    Attributes:
        queries: On the query axis.
        keys: On the key axis.
        causal: Whether query i sees keys 0 to i; there are as many of both then.
        first: Whether these queries come for the first time.
    """

    queries: slice
    keys: slice
    causal: bool
    first: bool


def pieces(spans: Iterable[Span]) -> Iterator[Piece]:
    """Pieces that hold every visible pair of the spans once, and no other."""
    for span in spans:
        # The first query sees all keys, and so does every other.
        if span.causal_offset is None or span.causal_offset >= span.key_end - span.key_start - 1:
            yield Piece(span.queries, span.keys, causal=False, first=True)
            continue
        diagonal = span.key_start + span.causal_offset
        if span.causal_offset:
            # What even the first query sees before its last key.
            yield Piece(span.queries, slice(span.key_start, diagonal), causal=False, first=True)
        size = min(span.query_end - span.query_start, span.key_end - diagonal)
        below = span.query_start + size
        keys, first = slice(diagonal, diagonal + size), not span.causal_offset
        yield Piece(slice(span.query_start, below), keys, causal=True, first=first)
        if below < span.query_end:
            yield Piece(slice(below, span.query_end), keys, causal=False, first=first)


@cached_by_identity(maxsize=1024)
def cut_into_pieces(spans: tuple[Span, ...]) -> tuple[Piece, ...]:
    """:func:`pieces`, once for all layers."""
    return tuple(pieces(spans))
