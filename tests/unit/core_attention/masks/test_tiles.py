"""Tile tables of kernels hold every visible pair of query and key once, and no other pair.

Parts of the queries: as many as fit into memory, each query once, with tiles of their own.
"""

import random
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from absorbed_mla.core_attention.masks import parts as query_parts
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.masks.tiles import SEES_ALL, key_tiles, query_tiles
from tests.support.combinations import grid, thinned
from tests.support.spans import visible

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


def pairs(
    queries: tuple[int, int], keys: tuple[int, int], offset: int, window: int | None = None
) -> Tensor:
    """Int [QUERIES, KEYS]: 1 where a tile's rule shows the pair to a kernel."""
    q, k = torch.arange(QUERIES)[:, None], torch.arange(KEYS)[None]
    inside = (queries[0] <= q) & (q < queries[1]) & (keys[0] <= k) & (k < keys[1])
    place = q - queries[0] + offset
    old = False if window is None else k - keys[0] <= place - window
    return (inside & (k - keys[0] <= place) & ~torch.as_tensor(old)).int()


def random_spans(seed: int) -> tuple[Span, ...]:
    """Disjoint queries; keys anywhere."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(QUERIES + 1), 6))
    spans = []
    for start, end in zip(cuts[::2], cuts[1::2]):
        first, last = sorted(rng.choices(range(KEYS + 1), k=2))
        spans.append(Span(start, end, first, last, rng.choice([None, 0, *range(-12, 40, 3)])))
    return tuple(spans)


def tiles(kind: str, spans, tokens: int, total: int | None = None, window: int | None = None):
    """(queries, keys, offset) of every tile of queries, or of keys."""
    make = query_tiles if kind == "query" else key_tiles
    for row in make(spans, tokens, total, window).tolist():
        own, others, offset = row[:2], row[2:4], row[4]
        assert 0 < own[1] - own[0] <= tokens and others[0] <= others[1]
        yield (own, others, offset) if kind == "query" else (others, own, offset)


SIZES = (1, 7, 64)
SPANS = CASES | {f"random {i}": random_spans(i) for i in range(5 if thinned() else 20)}
kinds = pytest.mark.parametrize(("kind", "total"), [("query", QUERIES), ("key", KEYS)])


@grid(1, {"spans": SPANS, "tokens": SIZES})
class TestVisibility:
    @kinds
    @pytest.mark.parametrize("covering", [False, True])
    def test_every_visible_pair_once(self, spans, tokens, kind, total, covering):
        """Also where tiles cover tokens that are in no span."""
        shown = torch.zeros(QUERIES, KEYS, dtype=torch.int32)
        for queries, keys, offset in tiles(kind, spans, tokens, total if covering else None):
            shown += pairs(queries, keys, offset)
            # The last query sees the last key, the first key is seen by the first query.
            seen = (queries[1] - 1, keys[1] - 1) if kind == "query" else (queries[0], keys[0])
            if not covering and queries[0] < queries[1] and keys[0] < keys[1]:
                assert shown[seen]
        assert torch.equal(shown, visible(spans, QUERIES, KEYS).int())

    @kinds
    def test_windows(self, spans, tokens, kind, total):
        """Every visible pair once, and tiles begin and end with what is in a pair."""
        spans = tuple(
            replace(x, causal_offset=x.num_keys if x.causal_offset is None else x.causal_offset)
            for x in spans
        )
        window = {1: 9, 4: 1, 7: 99, 64: 12}[tokens]
        shown = torch.zeros(QUERIES, KEYS, dtype=torch.int32)
        for queries, keys, offset in tiles(kind, spans, tokens, total, window):
            seen = pairs(queries, keys, offset, window)
            shown += seen
            block = seen[slice(*queries), slice(*keys)].bool()
            if block.numel():
                assert block.any(0 if kind == "query" else 1)[[0, -1]].all()
                # The kernel hides old keys in the first ``tokens`` of a tile only.
                assert kind == "key" or queries[1] - queries[0] + offset - window < tokens
        assert torch.equal(shown, visible(spans, QUERIES, KEYS, window).int())

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

    @kinds
    def test_mask_is_skipped_where_it_hides_nothing(self, spans, tokens, kind, total):
        """Most tiles of a long sequence, where the kernel saves the comparison."""
        for queries, keys, offset in tiles(kind, spans, tokens):
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


SPANS = (Span(0, 50, 0, 50, 0), Span(60, 90, 40, 140, None), Span(90, 100, 0, 30, -4))


@pytest.mark.parametrize("most", [1, 4000, 10**9])
def test_parts(most, monkeypatch):
    monkeypatch.setattr(query_parts, "MOST_BYTES", most)
    tiles, parts = query_parts.query_parts(SPANS, tokens=4, pair_bytes=8)
    seen, end_of_last = [], 0
    for start, end, key_start, key_end, first, last in parts.tolist():
        assert key_start < key_end and first == end_of_last
        assert end - start <= 4 or 8 * (end - start) * (key_end - key_start) <= most
        mine, end_of_last = tiles[first:last], last
        assert int(mine[:, 0].min()) == start and int(mine[:, 1].max()) == end
        assert (mine[:, 2] == key_start).all() and int(mine[:, 3].max()) == key_end
        # All tiles but the last are full, counted from the part's first query.
        assert ((mine[:, 0] - start) % 4 == 0).all()
        seen += range(start, end)
    assert end_of_last == len(tiles) and sorted(set(seen)) == sorted(seen)
    visible = (row for row in query_tiles(SPANS, 1).tolist() if row[2] < row[3])
    assert {row[0] for row in visible} <= set(seen)


def test_parts_are_as_long_as_fits(monkeypatch):
    """First queries see few keys, so that more of them fit; powers of two, or multiples of 128."""
    monkeypatch.setattr(query_parts, "MOST_BYTES", 4000)
    _, parts = query_parts.query_parts(SPANS[:1], tokens=4, pair_bytes=8)
    assert (parts[:, 1] - parts[:, 0]).tolist() == [16, 8, 8, 8, 8, 2]
    monkeypatch.setattr(query_parts, "MOST_BYTES", 8 * 600 * 600)
    _, parts = query_parts.query_parts((Span(0, 1000, 0, 1000, 0),), tokens=4, pair_bytes=8)
    assert (parts[:, 1] - parts[:, 0]).tolist() == [512, 384, 104]


def test_nothing_to_see():
    tiles, parts = query_parts.query_parts((Span(1, 6, 0, 9, -8),), 4, 8)
    assert tiles.shape == (0, 5) and parts.shape == (0, 6)
