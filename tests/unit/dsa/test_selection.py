"""The selection against a sort of every row: highest score first, then the lowest index."""

from functools import partial

import pytest
import torch
from torch import Tensor

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.core_attention.masks.spans import Span, Spans, self_attention_spans
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.key_subset import VisibleKeys, visible_keys
from absorbed_mla.dsa.selection import best_keys, select
from absorbed_mla.sequences import SequenceLayout
from tests import oracle_dsa
from tests.support import needs, world
from tests.support.combinations import grid
from tests.support.memory import PeakMemory
from tests.support.spans import visible

pytestmark = pytest.mark.usefixtures("_on_the_device")
LAYOUTS = {
    "sbhd": (SequenceLayout.dense(19), 2),
    "thd": (SequenceLayout.pack((5, 1, 0, 13)), 1),
    "thd_padded": (SequenceLayout(24, (0, 9, 11), (8, 1, 12), (9, 2, 13), packed=True), 1),
}


def index_of(queries: int, keys: int, batch: int, ties: bool) -> IndexVectors:
    """Few different scores with ``ties``: small integers, exact in any order of sums."""
    shapes = (queries, batch, 3, 4), (keys, batch, 4), (queries, batch, 3)
    draw = partial(torch.randint, -1, 2) if ties else torch.randn
    return IndexVectors(*(draw(shape, dtype=torch.float64) for shape in shapes))


def random_index(tokens: int, requires_grad: bool = False) -> IndexVectors:
    """At DeepSeek-V3.2's widths: 64 heads of 128 in bf16, head weights in fp32."""
    query, key = (torch.randn(tokens, 1, *n, dtype=torch.bfloat16) for n in ((64, 128), (128,)))
    weights = torch.randn(tokens, 1, 64) * 8192**-0.5
    return IndexVectors(*(x.requires_grad_(requires_grad) for x in (query, key, weights)))


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


SWITCHES = {"relu": [False, True], "ties": [False, True]}
SIZES = {"topk": [1, 4, 30], "elements": [1, 40, 2**24]}


@grid(2, {"layout": [*LAYOUTS], **SIZES, **SWITCHES})
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


INF, NAN = float("inf"), float("nan")
# Rows of scores, all of whose keys are seen, and which are chosen.
ORDER = {
    "the first of equal scores": ([[1, 2, 1, 2, 1], [0, 0, 0, 0, 0]], [[0, 1, 3], [0, 1, 2]]),
    # A ReLU times a negative weight is -0.
    "zeros are equal": ([[-0.0, 0.0, -0.0, 0.0]], [[0, 1]]),
    "infinities": ([[-INF, 0, -INF, -INF], [INF, 1, INF, 2]], [[0, 1], [0, 2]]),
    # A selection without it would hide that the indexer's input is broken.
    "NaN is chosen": ([[3.0, NAN, 1.0], [NAN] * 3], [[0, 1], [0, 1]]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ORDER)
def test_order(case, dtype):
    scores, chosen = (torch.tensor(rows) for rows in ORDER[case])
    span = Span(0, len(scores), 0, scores.shape[1], None)
    keys = VisibleKeys(span, world.device(), 1)
    found = best_keys(scores.to(dtype)[None], keys, chosen.shape[1])
    assert found[0].tolist() == chosen.tolist()


def test_hidden_keys_are_never_chosen():
    """Also where scores of the visible ones are -inf."""
    scores = torch.tensor([[-INF, -INF, -INF, 9.0]]).expand(1, 2, 4)
    found = best_keys(scores, VisibleKeys(Span(0, 2, 0, 4, 2), world.device(), 1), 2)
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


@needs.gpu
@pytest.mark.parametrize("levels", [5, 10**6], ids=["ties", "distinct"])
def test_selects_what_a_cpu_does(levels):
    """A fixed table of scores, with thousands of ties at the threshold or almost none."""
    queries, keys, topk = 64, 16384, 2048
    scores = torch.randint(levels, (1, queries, keys), device="cpu").float() - levels // 2
    span = Span(0, queries, 0, keys, keys - queries)
    expected = best_keys(scores, VisibleKeys(span, torch.device("cpu"), 1), topk)
    for _ in range(3):
        found = best_keys(scores.cuda(), VisibleKeys(span, world.device(), 1), topk)
        assert torch.equal(found.cpu(), expected)


@needs.gpu
def test_repeats_on_a_gpu():
    index, spans = random_index(6144), self_attention_spans(SequenceLayout.dense(6144), True)
    first = select(index, spans, 2048, relu=True)
    assert torch.equal(select(index, spans, 2048, relu=True), first)
    assert first.shape == (6144, 1, 2048) and int((first[-1] >= 0).sum()) == 2048


def test_chunks_fill_tiles():
    """A tile of a kernel has 64 queries; 85 would cost as much as 128."""
    spans = Spans([Span(0, 200, 0, 1000, 800)])
    sizes = [keys.span.num_queries for keys in visible_keys(spans, 1, torch.device("cpu"), 85_000)]
    assert sizes == [64, 64, 64, 8]
