"""Parts of the queries: as many as fit, each query once, tiles of their own."""

from __future__ import annotations

import pytest

from absorbed_mla.core_attention.masks import parts as module
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.masks.tiles import query_tiles

SPANS = (Span(0, 50, 0, 50, 0), Span(60, 90, 40, 140, None), Span(90, 100, 0, 30, -4))


@pytest.mark.parametrize("most", [1, 4000, 10**9])
def test_parts(most, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", most)
    tiles, parts = module.query_parts(SPANS, tokens=4, pair_bytes=8)
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
    monkeypatch.setattr(module, "MOST_BYTES", 4000)
    _, parts = module.query_parts(SPANS[:1], tokens=4, pair_bytes=8)
    assert (parts[:, 1] - parts[:, 0]).tolist() == [16, 8, 8, 8, 8, 2]
    monkeypatch.setattr(module, "MOST_BYTES", 8 * 600 * 600)
    _, parts = module.query_parts((Span(0, 1000, 0, 1000, 0),), tokens=4, pair_bytes=8)
    assert (parts[:, 1] - parts[:, 0]).tolist() == [512, 384, 104]


def test_nothing_to_see():
    tiles, parts = module.query_parts((Span(1, 6, 0, 9, -8),), 4, 8)
    assert tiles.shape == (0, 5) and parts.shape == (0, 6)
