"""The choice of keys over a paged cache and by scores in FP8, against plain PyTorch, to the key."""

import pytest
import torch

from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.selection import select
from absorbed_mla.inference.rows import Rows
from absorbed_mla.registry import INDEXER_BACKENDS
from tests.support import needs, world
from tests.support.backends import triton_interpreter
from tests.support.gpu_calls import capture
from tests.support.hostile import poisoned_memory

pytest.importorskip("triton")
pytestmark = [pytest.mark.no_cover, pytest.mark.usefixtures("interpreted")]
DEVICE = world.device()

with triton_interpreter():
    from absorbed_mla.dsa.selection_triton import triton_select_cached
    from absorbed_mla.kernels.dsa import cached_scores, index_scores, radix_select


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Blocks, parts, tiles and groups of which the tests have several."""
    for name, value in {"_KEYS": 32, "_BLOCKS": 2, "_TOKENS": 4}.items():
        monkeypatch.setattr(cached_scores, name, value)
    monkeypatch.setattr(index_scores, "_TILE", (32, 32, 4, 1))
    monkeypatch.setattr(radix_select, "_GROUPS", 32)
    monkeypatch.setattr(radix_select, "_KEPT", 128)


class Requests:
    """Requests whose keys lie in scattered blocks among poison, and their new tokens."""

    def __init__(self, query_lengths, kv_lengths, block_size=8, spare=3, heads=3, width=16):
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

    def expected(self, topk: int, relu: bool = True) -> torch.Tensor:
        """The choice of every request alone."""
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

    def found(self, topk: int, relu: bool = True, **more) -> torch.Tensor:
        operands = self.query, self.weights, self.cache, self.rows
        return triton_select_cached(*operands, topk, relu=relu, **more)


# Of several parts, and rounds; a row of padding; a row with fewer keys than are chosen.
ONE_EACH = [1, 0, 1, 1], [150, 0, 70, 9], 20
# Tiles with tokens of several requests, scores in parts, tokens in no row at the end.
CHUNKS = [6, 1, 0, 9], [40, 90, 0, 9], 12


@pytest.mark.parametrize(
    ("lengths", "relu", "more"),
    [
        (ONE_EACH, True, {}),
        (ONE_EACH, False, {}),
        (CHUNKS, True, {}),
        (CHUNKS, True, {"elements": 8 * 90}),
    ],
    ids=["one_each", "one_each-no_relu", "chunks", "chunks-in_parts"],
)
def test_requests(lengths, relu, more):
    requests, topk = Requests(*lengths[:2]), lengths[2]
    with poisoned_memory():
        found = requests.found(topk, relu, **more)
    assert torch.equal(found, requests.expected(topk, relu))


def test_no_choice():
    """No score is computed: the cache is not read."""
    requests = Requests([2, 1], [7, 12])
    requests.cache = requests.cache[:0]
    assert torch.equal(requests.found(12), requests.expected(12))


@needs.gpu
def test_in_a_graph(monkeypatch):
    """Replayed for other lengths, at the sizes of a model."""
    monkeypatch.undo()
    requests = Requests([1] * 4, [9000, 40000, 100, 2049], block_size=64, heads=64, width=128)
    graph, found = capture(lambda: requests.found(2048))
    for lengths in ([9000, 40000, 100, 2049], [5000, 20000, 1, 2048]):
        requests.kv_lengths = lengths
        requests.rows.kv_lengths.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(found, requests.expected(2048))


class TestFp8:
    WIDTH, HEADS, TOPK = 32, 3, 12

    def numbers(self, *shape: int) -> torch.Tensor:
        """Whole numbers that e4m3 has to round, of rows of other sizes: their sums are exact."""
        make = torch.Generator().manual_seed(sum(shape))
        size = 2.0 ** torch.randint(0, 2, shape[:-1], generator=make)[..., None]
        found = torch.randint(-40, 41, shape, generator=make) * size
        return found.to(DEVICE, torch.bfloat16)

    def weights(self, *shape: int) -> torch.Tensor:
        make = torch.Generator().manual_seed(1)
        return torch.randint(-2, 3, shape, generator=make).float().to(DEVICE)

    def check(self, method: str, *operands, **more) -> None:
        """Triton's choice is PyTorch's, and not that without FP8."""
        found, expected, unrounded = (
            getattr(INDEXER_BACKENDS[name], method)(*operands, self.TOPK, **more)
            for name in ("triton_fp8", "reference_fp8", "reference")
        )
        assert torch.equal(found, expected)
        assert not torch.equal(unrounded, expected)

    @pytest.mark.parametrize("relu", [True, False])
    def test_training(self, relu):
        query = self.numbers(22, 2, self.HEADS, self.WIDTH)
        keys = self.numbers(70, 2, self.WIDTH)
        index = IndexVectors(query, keys, self.weights(22, 2, self.HEADS))
        spans = Span(0, 13, 0, 50, causal_offset=37), Span(13, 22, 50, 70, causal_offset=11)
        self.check("select", index, Spans(spans), relu=relu, tp_group=None)

    @pytest.mark.parametrize("new", [[1, 1, 1], [6, 1, 3]], ids=["decode", "prompts"])
    def test_cached(self, new):
        lengths, block_size = [200, 90, 9], 8
        blocks = -(-max(lengths) // block_size)
        table = torch.randperm(3 * blocks).int().view(3, blocks).to(DEVICE)
        query = self.numbers(sum(new), self.HEADS, self.WIDTH)
        cache = self.numbers(3 * blocks, block_size, self.WIDTH)
        operands = query, self.weights(sum(new), self.HEADS), cache, Rows.of(new, lengths, table)
        self.check("select_cached", *operands, relu=True)
