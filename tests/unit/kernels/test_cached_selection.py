"""The choice of keys over a paged cache against the choice of every request alone."""

from __future__ import annotations

import pytest
import torch

from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.selection import select
from absorbed_mla.inference.rows import Rows
from tests.support import needs
from tests.support.backends import triton_interpreter
from tests.support.hostile import poisoned_memory

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, HEADS = 16, 3

with triton_interpreter():
    from absorbed_mla.dsa.selection_triton import triton_select_cached
    from absorbed_mla.kernels.dsa import cached_scores, radix_select


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Blocks, parts, tiles and groups of which the tests have several."""
    for name, value in {"_KEYS": 32, "_BLOCKS": 2, "_TOKENS": 4}.items():
        monkeypatch.setattr(cached_scores, name, value)
    monkeypatch.setattr(radix_select, "_GROUPS", 32)
    monkeypatch.setattr(radix_select, "_KEPT", 128)
    with triton_interpreter():
        yield


class Requests:
    """Requests whose keys lie in scattered blocks among poison, and their new tokens."""

    def __init__(self, query_lengths, kv_lengths, block_size=8, spare=3, heads=HEADS, width=WIDTH):
        make = torch.Generator().manual_seed(0)
        self.query_lengths, self.kv_lengths = query_lengths, kv_lengths
        tokens = sum(query_lengths) + spare
        # Small whole numbers: exact products, and ties.
        self.query, self.keys = (
            torch.randint(-2, 3, shape, generator=make).to(DEVICE, torch.bfloat16)
            for shape in ((tokens, heads, width), (len(kv_lengths), max(kv_lengths), width))
        )
        self.weights = torch.randint(-2, 3, (tokens, heads), generator=make).float().to(DEVICE)
        blocks = -(-max(kv_lengths) // block_size)
        order = torch.randperm(len(kv_lengths) * blocks + 2, generator=make)[2:].to(DEVICE)
        self.cache = self.keys.new_full((len(order) + 2, block_size, width), torch.nan)
        table = order.int().view(len(kv_lengths), blocks)
        self.rows = Rows.of(query_lengths, kv_lengths, table)
        for row, length in enumerate(kv_lengths):
            key = torch.arange(length, device=DEVICE)
            slots = table[row, key // block_size].long(), key % block_size
            self.cache[slots] = self.keys[row, :length]

    def expected(self, topk: int, relu: bool) -> torch.Tensor:
        found = torch.full((len(self.query), topk), -1, dtype=torch.int32, device=DEVICE)
        start = 0
        for row, (new, length) in enumerate(zip(self.query_lengths, self.kv_lengths)):
            own = slice(start, start + new)
            index = (self.query[own], self.keys[row, :length], self.weights[own])
            index = IndexVectors(*(x.unsqueeze(1) for x in index))
            spans = Spans([Span(0, new, 0, length, length - new)])
            if new:
                found[own] = select(index, spans, topk, relu=relu)[:, 0]
            start += new
        return found

    def found(self, topk: int, relu: bool, **more) -> torch.Tensor:
        operands = self.query, self.weights, self.cache, self.rows
        with poisoned_memory():
            return triton_select_cached(*operands, topk, relu=relu, **more)


@pytest.mark.no_cover
@pytest.mark.parametrize("relu", [True, False])
def test_one_token_each(relu):
    """Of several parts, and rounds; a row of padding; a row with fewer keys than are chosen."""
    requests = Requests([1, 0, 1, 1], [150, 0, 70, 9])
    assert torch.equal(requests.found(20, relu), requests.expected(20, relu))


@pytest.mark.no_cover
def test_chunks_of_prompts():
    """Tiles with tokens of several requests, scores in parts, tokens in no row at the end."""
    requests = Requests([6, 1, 0, 9], [40, 90, 0, 9])
    expected = requests.expected(12, True)
    assert torch.equal(requests.found(12, True), expected)
    assert torch.equal(requests.found(12, True, elements=8 * 90), expected)


@pytest.mark.no_cover
def test_no_choice():
    """No score is computed: the cache is not read."""
    requests = Requests([2, 1], [7, 12])
    requests.cache = requests.cache[:0]
    assert torch.equal(requests.found(12, True), requests.expected(12, True))


@pytest.mark.no_cover
@needs.gpu
def test_in_a_graph(monkeypatch):
    """Replayed for other lengths, at the sizes of a model."""
    monkeypatch.undo()
    requests = Requests([1] * 4, [9000, 40000, 100, 2049], block_size=64, heads=64, width=128)
    requests.found(2048, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operands = requests.query, requests.weights, requests.cache, requests.rows
        found = triton_select_cached(*operands, 2048, relu=True)
    for lengths in ([9000, 40000, 100, 2049], [5000, 20000, 1, 2048]):
        requests.kv_lengths = lengths
        requests.rows.kv_lengths.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(found, requests.expected(2048, True))
