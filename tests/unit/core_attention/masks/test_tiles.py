"""Tile tables of kernels hold every visible pair of query and key once, and no other pair."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.masks.tiles import SEES_ALL, key_tiles, query_tiles

QUERIES, KEYS = 45, 61

CASES = {
    "causal": (Span(0, 45, 0, 45, 0),),
    "all keys": (Span(0, 45, 0, 61, None),),
    "bottom right": (Span(0, 45, 0, 61, 16),),
    "more queries than keys": (Span(0, 45, 3, 10, 0),),
    "first queries see nothing": (Span(0, 45, 0, 61, -7),),
    "nobody sees anything": (Span(0, 20, 0, 61, -20),),
    "no keys": (Span(0, 45, 5, 5, None),),
    "no queries": (Span(7, 7, 0, 61, 0),),
    "no spans": (),
    "one query": (Span(44, 45, 0, 61, 60),),
    "offset beyond the keys": (Span(3, 9, 3, 9, 40),),
    "packed": tuple(Span(a, b, a, b, 0) for a, b in [(0, 1), (1, 18), (18, 40)]),
    "padding": tuple(Span(a, b, a, b, 0) for a, b in [(0, 11), (16, 29), (32, 44)]),
    # As one rank of context parallelism has them: two pieces of the queries over the same keys.
    "shared keys": (Span(0, 20, 0, 20, 0), Span(20, 45, 0, 61, 36)),
    "overlapping keys": (Span(0, 9, 5, 40, 3), Span(9, 30, 20, 50, None), Span(30, 45, 0, 50, 35)),
    # What a window of the keys leaves of two causal sequences.
    "key window": (Span(11, 20, 0, 9, 0), Span(20, 45, 9, 26, 16)),
}


def visible(spans) -> Tensor:
    """Bool [QUERIES, KEYS], pair by pair as ``Span`` defines it."""
    table = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
    for span in spans:
        for i, query in enumerate(range(span.query_start, span.query_end)):
            for j, key in enumerate(range(span.key_start, span.key_end)):
                table[query, key] |= span.causal_offset is None or j <= i + span.causal_offset
    return table


def pairs(queries: tuple[int, int], keys: tuple[int, int], offset: int) -> Tensor:
    """Int [QUERIES, KEYS]: 1 where a tile's rule shows the pair to a kernel."""
    q, k = torch.arange(QUERIES)[:, None], torch.arange(KEYS)[None]
    inside = (queries[0] <= q) & (q < queries[1]) & (keys[0] <= k) & (k < keys[1])
    return (inside & (k - keys[0] <= q - queries[0] + offset)).int()


def random_spans(seed: int) -> tuple[Span, ...]:
    """Disjoint queries; keys anywhere."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(QUERIES + 1), 6))
    spans = []
    for start, end in zip(cuts[::2], cuts[1::2]):
        first, last = sorted(rng.choices(range(KEYS + 1), k=2))
        spans.append(Span(start, end, first, last, rng.choice([None, 0, *range(-12, 40, 3)])))
    return tuple(spans)


EVERY = [*CASES.values(), *map(random_spans, range(20))]
IDS = [*CASES, *(f"random {seed}" for seed in range(20))]


@pytest.mark.parametrize("tokens", [1, 4, 7, 64])
@pytest.mark.parametrize("spans", EVERY, ids=IDS)
class TestVisibility:
    def test_query_tiles(self, spans, tokens):
        shown = torch.zeros(QUERIES, KEYS, dtype=torch.int32)
        for q0, q1, k0, k1, offset in query_tiles(spans, tokens).tolist():
            assert 0 < q1 - q0 <= tokens and k0 <= k1
            shown += pairs((q0, q1), (k0, k1), offset)
            if k0 < k1:
                assert shown[q1 - 1, k1 - 1], "the last query sees the last key"
        assert torch.equal(shown, visible(spans).int())

    def test_key_tiles(self, spans, tokens):
        shown = torch.zeros(QUERIES, KEYS, dtype=torch.int32)
        for k0, k1, q0, q1, offset, _ in key_tiles(spans, tokens).tolist():
            assert 0 < k1 - k0 <= tokens and q0 <= q1
            shown += pairs((q0, q1), (k0, k1), offset)
            if q0 < q1:
                assert shown[q0, k0], "the first query sees the first key"
        assert torch.equal(shown, visible(spans).int())

    def test_every_query_is_in_one_tile(self, spans, tokens):
        seen = torch.zeros(QUERIES, dtype=torch.int32)
        for q0, q1, *_ in query_tiles(spans, tokens, QUERIES).tolist():
            assert 0 < q1 - q0 <= tokens
            seen[q0:q1] += 1
        assert (seen == 1).all()

    def test_every_key_is_in_one_tile_of_every_layer(self, spans, tokens):
        rows = key_tiles(spans, tokens, KEYS)
        seen = torch.zeros(int(rows[:, 5].max()) + 1, KEYS, dtype=torch.int32)
        for k0, k1, *_, layer in rows.tolist():
            assert 0 < k1 - k0 <= tokens
            seen[layer, k0:k1] += 1
        assert (seen == 1).all()

    def test_covering_shows_no_other_pair(self, spans, tokens):
        shown = torch.zeros(2, QUERIES, KEYS, dtype=torch.int32)
        for q0, q1, k0, k1, offset in query_tiles(spans, tokens, QUERIES).tolist():
            shown[0] += pairs((q0, q1), (k0, k1), offset)
        for k0, k1, q0, q1, offset, _ in key_tiles(spans, tokens, KEYS).tolist():
            shown[1] += pairs((q0, q1), (k0, k1), offset)
        assert (shown == visible(spans).int()).all()

    def test_mask_is_skipped_where_it_hides_nothing(self, spans, tokens):
        """Most tiles of a long sequence, where the kernel saves the comparison."""
        tables = [(row[:2], row[2:4], row[4]) for row in query_tiles(spans, tokens).tolist()]
        tables += [(row[2:4], row[:2], row[4]) for row in key_tiles(spans, tokens).tolist()]
        for queries, keys, offset in tables:
            block = pairs(queries, keys, offset)[slice(*queries), slice(*keys)]
            if block.numel():
                assert (offset == SEES_ALL) == bool(block.all())


class TestTables:
    def test_integers(self):
        spans = (Span(0, 2**20, 0, 2**20, None),)
        for table, columns in ((query_tiles(spans, 64), 5), (key_tiles(spans, 64), 6)):
            assert table.dtype == torch.int32 and table.shape == (2**14, columns)
            assert table.max() == SEES_ALL and table.min() == 0

    def test_longest_first(self):
        spans = tuple(Span(a, b, a, b, 0) for a, b in [(0, 30), (30, 100), (100, 108)])
        queries, keys = query_tiles(spans, 8), key_tiles(spans, 8)
        work = (queries[:, 3] - queries[:, 2], keys[:, 3] - keys[:, 2])
        assert all((w[:-1] >= w[1:]).all() for w in work)

    def test_layers_are_as_few_as_spans_on_one_key(self):
        spans = tuple(Span(i, i + 1, 10 * i, 10 * i + 15, None) for i in range(6))
        assert int(key_tiles(spans, 4)[:, 5].max()) == 1

    def test_no_tokens_at_all(self):
        assert query_tiles((), 64, 0).shape == (0, 5) and key_tiles((), 64, 0).shape == (0, 6)

    @pytest.mark.parametrize("make", [query_tiles, key_tiles])
    def test_a_thousand_documents_are_quick(self, make):
        """Made once per batch, on the host, in 2.5 ms: Python works on documents, not on tiles."""

        def calls(documents: int, tokens: int) -> int:
            spans = tuple(
                Span(1000 * i, 1000 * i + 997, 1000 * i, 1000 * i + 997, 0)
                for i in range(documents)
            )
            return calls_of_python(lambda: make(spans, tokens, 1000 * documents))

        assert calls(1000, 8) < calls(1000, 64) + 50
        assert calls(1000, 64) < calls(500, 64) + 10 * 500


def calls_of_python(function) -> int:
    """Number of Python calls of ``function``; unlike time, it is the same on a busy machine."""
    count = 0

    def profile(frame, event, argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
