"""Spans of queries and keys: difficult ones by name, random ones, and their visible pairs."""

from collections.abc import Iterable

import torch
from hypothesis import strategies as st
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Span

QUERIES, KEYS = 24, 32

SPANS = {
    "causal": (Span(0, 24, 0, 24, 0),),
    "all_keys": (Span(0, 24, 0, 32, None),),
    "square": (Span(0, 24, 0, 24, None),),
    "bottom_right": (Span(0, 24, 0, 32, 8),),
    "window": (Span(2, 14, 4, 12, 3),),
    "pack": (Span(0, 5, 0, 5, 0), Span(5, 6, 5, 6, 0), Span(6, 24, 6, 24, 0)),
    "padding": (Span(0, 5, 0, 5, 0), Span(8, 17, 8, 17, 0)),
    "bottom_right_pack": (Span(0, 3, 0, 9, 6), Span(5, 9, 12, 18, 2)),
    "zigzag": (Span(0, 8, 0, 8, 0), Span(8, 16, 0, 32, 24), Span(16, 24, 3, 9, None)),
    # Queries of one call lie between those of another one, both ways.
    "interleaved": (
        Span(0, 4, 0, 4, 0),
        Span(4, 8, 0, 9, None),
        Span(8, 12, 4, 8, 0),
        Span(12, 16, 9, 12, None),
    ),
    # Seen as one causal rectangle, there are 12 queries and 8 keys.
    "wider_gap_of_queries": (Span(0, 2, 0, 4, 2), Span(10, 12, 5, 8, 1)),
    "one_token": (Span(0, 1, 0, 1, 0), Span(1, 3, 1, 3, 0), Span(4, 5, 4, 7, None)),
    "nothing": (),
}


def pairs_in(spans: tuple[Span, ...]) -> list[tuple[int, int]]:
    """The visible (query, key) pairs of all spans."""
    pairs = []
    for span in spans:
        assert span.query_start < span.query_end and span.key_start < span.key_end
        for i, query in enumerate(range(span.query_start, span.query_end)):
            for j, key in enumerate(range(span.key_start, span.key_end)):
                if span.causal_offset is None or j <= i + span.causal_offset:
                    pairs.append((query, key))
    return pairs


def visible(spans: Iterable[Span], queries: int, keys: int, window: int | None = None) -> Tensor:
    """Bool [queries, keys], pair by pair as ``Span`` defines it; spans may be empty.

    With a window those of the last keys up to a query's own position.
    """
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for span in spans:
        for i, query in enumerate(range(span.query_start, span.query_end)):
            for j, key in enumerate(range(span.key_start, span.key_end)):
                offset = span.causal_offset
                old = window is not None and j <= i + offset - window
                seen[query, key] |= offset is None or (j <= i + offset and not old)
    return seen


@st.composite
def any_span(draw) -> Span:
    """A span with at least one visible pair."""
    query_start, key_start = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    queries, keys = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    offset = draw(st.none() | st.integers(0, 8))
    if offset is not None:
        # A causal span ends where its last query does.
        keys = min(keys, offset + queries)
    return Span(query_start, query_start + queries, key_start, key_start + keys, offset)


@st.composite
def any_spans(draw) -> tuple[Span, ...]:
    """Spans in the order of their queries, with any keys."""
    found, first = [], 0
    for span in draw(st.lists(any_span(), min_size=1, max_size=6)):
        size = span.query_end - span.query_start
        first += draw(st.integers(0, 3))
        found.append(Span(first, first + size, span.key_start, span.key_end, span.causal_offset))
        first += size
    return tuple(found)
