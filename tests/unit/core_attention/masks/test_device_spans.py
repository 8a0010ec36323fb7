"""Tile tables that are made where the numbers of the spans are."""

import pytest
import torch

from absorbed_mla.core_attention.latent_kernels import query_tile_table
from absorbed_mla.core_attention.masks import tiles
from absorbed_mla.core_attention.masks.device_spans import DeviceSpans
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans

CPU = torch.device("cpu")


def on_device(lengths: list[int], starts: list[int], most: int = 4) -> DeviceSpans:
    numbers = (torch.tensor(one, dtype=torch.int32) for one in (starts, lengths))
    return DeviceSpans(*numbers, most)


CASES = {
    "one": ([300], [0], 300),
    "behind rows that decode": ([0, 0, 0, 200, 64, 63, 129], [0, 1, 2, 3, 203, 267, 330], 480),
    "padding of less than a tile": ([5, 7, 0, 0], [0, 5, 12, 12], 13),
    "padding of several": ([0, 65], [0, 1], 500),
    "as many as there may be, of one tile and a token": ([65] * 4, [0, 65, 130, 195], 260),
    "few tokens": ([0, 2, 3], [0, 1, 3], 6),
}


@pytest.mark.parametrize("case", CASES)
def test_same_tiles(case):
    """As of spans that the host knows, those with the most keys first; then empty ones."""
    lengths, starts, length = CASES[case]
    known = Spans(
        Span(start, start + count, start, start + count, 0)
        for start, count in zip(starts, lengths)
        if count
    )
    expected = tiles.query_tiles(known, 64, length)
    found = query_tile_table(on_device(lengths, starts), 64, length, CPU)
    assert found.dtype == torch.int32 and len(found) == length // 64 + 6
    used = found[:, 0] < found[:, 1]
    assert used.sum() == len(expected)
    seeing = int((expected[:, 2] < expected[:, 3]).sum())
    rows = [tuple(row) for row in found[used].tolist()]
    assert rows[:seeing] == [tuple(row) for row in expected[:seeing].tolist()]
    # Without keys it does not matter which they are not.
    bounds = {row[:2] for row in rows[seeing:]}
    assert bounds == {tuple(row[:2]) for row in expected[seeing:].tolist()}
    assert all(row[2] == row[3] for row in rows[seeing:])
    unused = found[~used]
    assert (unused[:, 2] == unused[:, 3]).all() and (unused[:, 0] <= length).all()


def test_table_is_made_once():
    spans = on_device([3], [0])
    rules = ScoreRules(scale=1.0, spans=spans).for_heads(2)
    assert rules.spans is spans
    assert spans.query_tiles(64, 3) is spans.query_tiles(64, 3)
    assert spans.query_tiles(64, 3) is not spans.query_tiles(128, 3)
