"""The selection against a sort of every row: highest score first, then the lowest index."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.core_attention.masks.spans import Span, Spans, self_attention_spans
from absorbed_mla.dsa.key_subset import VisibleKeys
from absorbed_mla.dsa.selection import best_keys, select
from absorbed_mla.dsa.types import IndexVectors
from absorbed_mla.sequences import SequenceLayout
from tests import oracle_dsa
from tests.support import world
from tests.support.memory import PeakMemory

pytestmark = pytest.mark.usefixtures("_on_the_device")
LAYOUTS = {
    "sbhd": (SequenceLayout.dense(19), 2),
    "thd": (SequenceLayout.pack((5, 1, 0, 13)), 1),
    "thd_padded": (SequenceLayout(24, (0, 9, 11), (8, 1, 12), (9, 2, 13), packed=True), 1),
}


def integers(shape, low, high) -> Tensor:
    return torch.randint(low, high, shape).double()


def index_of(queries: int, keys: int, batch: int, ties: bool) -> IndexVectors:
    """Few different scores with ``ties``: small integers, exact in any order of sums."""
    heads, width = 3, 4
    if ties:
        return IndexVectors(
            integers((queries, batch, heads, width), -1, 2),
            integers((keys, batch, width), -1, 2),
            integers((queries, batch, heads), -1, 2),
        )
    return IndexVectors(
        torch.randn(queries, batch, heads, width, dtype=torch.float64),
        torch.randn(keys, batch, width, dtype=torch.float64),
        torch.randn(queries, batch, heads, dtype=torch.float64),
    )


def visible(spans: Spans, queries: int, keys: int) -> Tensor:
    """Bool [queries, keys], from the definition of a span."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for span in spans:
        for q in range(span.query_start, span.query_end):
            for k in range(span.key_start, span.key_end):
                offset = span.causal_offset
                seen[q, k] = offset is None or k - span.key_start <= q - span.query_start + offset
    return seen


def expected(index: IndexVectors, spans: Spans, topk: int, relu: bool) -> Tensor:
    queries, batch = index.query.shape[:2]
    keys = len(index.key)
    found = torch.full((queries, batch, topk), -1, dtype=torch.int32)
    seen = visible(spans, queries, keys)
    for b in range(batch):
        products = torch.einsum("thd,sd->ths", index.query[:, b], index.key[:, b])
        products = products.relu() if relu else products
        scores = torch.einsum("th,ths->ts", index.weights[:, b], products)
        for q, row in enumerate(oracle_dsa.select(scores, seen, topk)):
            chosen = row.nonzero().flatten()
            found[q, b, : len(chosen)] = chosen
    return found


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("topk", [1, 4, 30])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("elements", [1, 40, 2**24])
def test_self_attention(layout, topk, relu, ties, elements):
    """Of every size of chunk; rows of padding choose nothing."""
    layout, batch = LAYOUTS[layout]
    spans = self_attention_spans(layout, causal=True)
    index = index_of(layout.num_tokens, layout.num_tokens, batch, ties)
    found = select(index, spans, topk, relu=relu, elements=elements)
    assert found.dtype == torch.int32
    assert torch.equal(found, expected(index, spans, topk, relu))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_queries_of_a_context_parallel_rank(layout, rank, causal):
    """Queries are some of the tokens, keys are all of them."""
    batch = 2 if layout == "sbhd" else 1
    whole = SequenceLayout.dense(16) if layout == "sbhd" else SequenceLayout.pack((8, 12))
    part = ContextParallelLayout.of(whole, 2, rank)
    spans = part.gathered_spans(causal)
    everything = index_of(whole.num_tokens, whole.num_tokens, batch, ties=True)
    tokens = part.tokens()
    index = IndexVectors(everything.query[tokens], everything.key, everything.weights[tokens])
    found = select(index, spans, 3, relu=True, elements=30)
    assert torch.equal(found, expected(index, spans, 3, True))
    truth = select(everything, self_attention_spans(whole, causal), 3, relu=True)
    assert torch.equal(found, truth[tokens])


def rows_of(scores: list[list[float]], topk: int, dtype=torch.float32) -> list[list[int]]:
    """What is chosen of rows of scores, all of whose keys are seen."""
    table = torch.tensor(scores, dtype=dtype)
    span = Span(0, len(table), 0, table.shape[1], None)
    return best_keys(table[None], VisibleKeys(span, world.device(), 1), topk)[0].tolist()


class TestOrder:
    inf, nan = float("inf"), float("nan")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_first_of_equal_scores(self, dtype):
        assert rows_of([[1, 2, 1, 2, 1], [0, 0, 0, 0, 0]], 3, dtype) == [[0, 1, 3], [0, 1, 2]]

    def test_zeros_are_equal(self):
        """A ReLU times a negative weight is -0."""
        assert rows_of([[-0.0, 0.0, -0.0, 0.0]], 2) == [[0, 1]]

    def test_infinities(self):
        rows = [[-self.inf, 0, -self.inf, -self.inf], [self.inf, 1, self.inf, 2]]
        assert rows_of(rows, 2) == [[0, 1], [0, 2]]

    def test_nan_is_chosen(self):
        """A selection without it would hide that the indexer's input is broken."""
        assert rows_of([[3.0, self.nan, 1.0], [self.nan] * 3], 2) == [[0, 1], [0, 1]]

    def test_hidden_keys_never(self):
        """Also where scores of the visible ones are -inf."""
        span = Span(0, 2, 0, 4, 2)
        scores = torch.tensor([[-self.inf, -self.inf, -self.inf, 9.0]]).expand(1, 2, 4)
        found = best_keys(scores, VisibleKeys(span, world.device(), 1), 2)
        assert found[0].tolist() == [[0, 1], [0, 3]]


@pytest.mark.parametrize("topk", [2, 30])
@pytest.mark.parametrize("offset", [-3, -1, 2, 10, None])
def test_offsets(offset, topk):
    """Queries that see nothing yet, and queries that see all keys from some query on."""
    spans = Spans([Span(1, 6, 3, 7, offset)])
    index = index_of(7, 8, 2, ties=True)
    found = select(index, spans, topk, relu=True, elements=5)
    assert torch.equal(found, expected(index, spans, topk, True))


def test_memory():
    """Scores of a chunk at a time: nothing grows with the square of the length."""
    tokens, elements = 2048, 2**16
    index = IndexVectors(*(x.float() for x in index_of(tokens, tokens, 1, ties=False)))
    spans = self_attention_spans(SequenceLayout.dense(tokens), True)
    with PeakMemory() as memory:
        chosen = select(index, spans, 16, relu=True, elements=elements)
    assert memory.peak < chosen.nbytes + 40 * elements < tokens * tokens
