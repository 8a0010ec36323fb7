"""Random sequences, packs and parts of sequences: which query sees which key."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Span, Spans
from checks.fuzz.draw import Draw


def draw_spans(draw: Draw, most: int, *tiles: int) -> tuple[int, int, Spans]:
    """Lengths of the axes of queries and keys, and spans over them."""
    kind = draw.choice("one", "pack", "pack", "parts")
    if kind == "one":
        queries, keys = draw.length(most, *tiles), draw.length(most, *tiles)
        if draw.flag():
            keys = max(queries, keys) if draw.flag() else queries
        return queries, keys, Spans([Span(0, queries, 0, keys, _offset(draw, queries, keys))])
    if kind == "pack":
        return _pack(draw, most, tiles)
    return _parts(draw, most, tiles)


def _offset(draw: Draw, queries: int, keys: int) -> int | None:
    return draw.often(keys - queries, None, 0, draw.integer(-queries, keys))


def _pack(draw: Draw, most: int, tiles: tuple[int, ...]) -> tuple[int, int, Spans]:
    """Sequences one after the other, with tokens of no sequence between some."""
    spans, start = [], 0
    with_padding, offset = draw.flag(), draw.often(0, 0, None)
    for length in draw.lengths(draw.integer(1, 6), most, *tiles):
        start += draw.integer(0, 3) if with_padding else 0
        spans.append(Span(start, start + length, start, start + length, offset))
        start += length
    start += draw.integer(0, 2) if with_padding else 0
    return start, start, Spans(spans)


def _parts(draw: Draw, most: int, tiles: tuple[int, ...]) -> tuple[int, int, Spans]:
    """Parts of sequences, as ranks of context parallelism have them: keys may be shared."""
    keys, spans, start = draw.length(most, *tiles), [], 0
    for length in draw.lengths(draw.integer(1, 3), most, *tiles):
        first = draw.integer(0, keys)
        end = draw.integer(first, keys)
        offset = _offset(draw, length, end - first)
        spans.append(Span(start, start + length, first, end, offset))
        start += length + draw.integer(0, 1)
    return start, keys, Spans(spans)


def with_offsets(spans: Spans) -> Spans:
    """The same pairs with a causal offset in every span, as windows need it."""
    every = (replace(x, causal_offset=x.num_keys) if x.causal_offset is None else x for x in spans)
    return Spans(every)


def visible(
    spans: Spans, queries: int, keys: int, device: torch.device, window: int | None = None
) -> Tensor:
    """Bool [S_q, S_k], pair by pair; with a window its last keys up to a query's position."""
    table = torch.zeros(queries, keys, dtype=torch.bool, device=device)
    for span in spans:
        seen = torch.ones(span.num_queries, span.num_keys, dtype=torch.bool, device=device)
        if span.causal_offset is not None:
            seen = seen.tril(span.causal_offset)
        if window is not None:
            assert span.causal_offset is not None
            seen = seen.triu(span.causal_offset - window + 1)
        table[span.queries, span.keys] = seen
    return table


def hide_unseen(x: Tensor, spans: Spans, *, of_keys: bool) -> Tensor:
    """``x`` [S, ...] with NaN for tokens in no span."""
    rows = torch.ones(len(x), dtype=torch.bool, device=x.device)
    for span in spans:
        rows[span.keys if of_keys else span.queries] = False
    x = x.clone()
    x[rows] = torch.nan
    return x


def draw_long_spans(draw: Draw, most_queries: int, most_keys: int) -> tuple[int, int, Spans]:
    """Few queries over many keys, causal as ``draw_spans`` means it."""
    keys, spans, start = draw.length(most_keys, 2048, most_keys // 2, least=1), [], 0
    for length in draw.lengths(draw.integer(1, 3), most_queries, 16, least=1):
        length = min(length, keys)
        first = draw.choice(0, draw.integer(0, keys - length))
        spans.append(Span(start, start + length, first, keys, keys - first - length))
        start += length
    return start, keys, Spans(spans)
