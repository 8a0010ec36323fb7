"""Chunks of queries whose scores fit into memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.masks.tiles import query_tiles

# Of what is stored of all pairs of a part, unless one tile needs more.
MOST_BYTES = 2**30
# Parts have a multiple of so many queries, or of a smaller power of two, and with causality end at
# such a key: products of matrices of other sizes take twice as long.
_STEP = 128


def query_parts(spans: Iterable[Span], tokens: int, pair_bytes: int) -> tuple[Tensor, Tensor]:
    """Cut spans into parts of which ``MOST_BYTES`` are stored at most, and parts into tiles.

    Args:
        spans: A query is in at most one of them.
        tokens: Most queries in a tile; all tiles of a part but its last have so many.
        pair_bytes: What is stored of a query token and a key.

    Returns:
        The tiles, int32 [tiles, 5], see ``query_tiles``, those of each part one after the other;
        and the parts, int64 [parts, 6]: the first query and the end, the first key and the end, and
        where the part's tiles begin and end. Queries that see no key may be in no part.
    """
    tiles, parts = [torch.zeros(0, 5, dtype=torch.int32)], []
    for part in _parts(spans, tokens, pair_bytes):
        first = sum(map(len, tiles))
        tiles.append(query_tiles([part], tokens))
        end = first + len(tiles[-1])
        parts.append((part.query_start, part.query_end, part.key_start, part.key_end, first, end))
    return torch.cat(tiles), torch.tensor(parts, dtype=torch.int64).view(-1, 6)


def _parts(spans: Iterable[Span], tokens: int, pair_bytes: int) -> Iterable[Span]:
    most = MOST_BYTES // pair_bytes
    for span in spans:
        start = span.query_start
        while start < span.query_end:
            fitting = _fitting(span, start, most)
            step = max(tokens, min(1 << max(fitting.bit_length() - 1, 0), _STEP))
            length = max(fitting // step, 1) * step
            end = min(start + length, span.query_end)
            part = span.within_queries(start, end)
            if part.num_keys > 0:
                yield part
            start = end


def _fitting(span: Span, start: int, most: int) -> int:
    """Queries from ``start`` on that, times the keys that the last one sees, are not above most."""
    everything = most // max(span.num_keys, 1)
    if span.causal_offset is None:
        return everything
    # Query start + n - 1 sees the keys before `seen` + n: n (seen + n) = most.
    seen = span.causal_offset + start - span.query_start
    fitting = (math.isqrt(seen * seen + 4 * most) - seen) // 2
    return fitting if seen + fitting <= span.num_keys else everything
