"""The indexer's kernels against plain PyTorch, in Triton's interpreter without a GPU."""

import pytest
import torch

from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.key_subset import ChosenKeys, VisibleKeys
from absorbed_mla.dsa.scores import add_index_gradient, index_scores
from absorbed_mla.dsa.selection import best_keys, select
from tests.support.backends import triton_interpreter
from tests.support.combinations import grid
from tests.support.hostile import poisoned_memory
from tests.support.numerics import relative_error

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreted")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

with triton_interpreter():
    import absorbed_mla.kernels.dsa.index_gradient
    import absorbed_mla.kernels.dsa.index_scores  # noqa: F401
    from absorbed_mla.dsa import indexer_triton, selection_triton
    from absorbed_mla.kernels.dsa import index_chosen, radix_select, scatter_add


def vectors(queries, keys, batch=1, heads=3, width=16, dtype=torch.bfloat16) -> IndexVectors:
    make = torch.Generator().manual_seed(0)
    query = torch.randn(queries, batch, heads, width, generator=make)
    key = torch.randn(keys, batch, width, generator=make)
    weights = torch.randn(queries, batch, heads, generator=make)
    return IndexVectors(query.to(DEVICE, dtype), key.to(DEVICE, dtype), weights.to(DEVICE))


@pytest.mark.no_cover
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "span", [Span(0, 130, 0, 130, 0), Span(3, 40, 7, 150, 100), Span(0, 9, 2, 31, None)], ids=str
)
def test_scores(span, dtype, relu):
    index = vectors(140, 300, batch=2, dtype=dtype)
    [chunk] = Spans([span]).chunks(1000)
    keys = VisibleKeys(chunk, DEVICE, heads=100)
    with poisoned_memory():
        found = selection_triton.triton_index_scores(index, keys, relu)
    truth = index_scores(index._replace(weights=index.weights.double()), keys, relu)
    seen = keys.seen.expand(truth.shape)
    assert found.dtype == torch.float32 and found.shape == truth.shape
    assert relative_error(found[seen].double(), truth[seen]) < 1e-6


@pytest.mark.no_cover
def test_not_numbers():
    """NaN passes the ReLU, and stays with the query that has it."""
    index = vectors(4, 40, width=32)
    index.query[2, 0, 1] = torch.nan
    [chunk] = Spans([Span(0, 4, 0, 40, None)]).chunks(1000)
    chosen = torch.arange(40, dtype=torch.int32, device=DEVICE).expand(4, 1, 40)
    for subset in (VisibleKeys(chunk, DEVICE, heads=100), ChosenKeys(slice(0, 4), chosen, 100)):
        found = indexer_triton.triton_scores(index, subset, relu=True).isnan()
        assert found[:, 2].all() and not found[:, [0, 1, 3]].any()


def hostile_scores(kind: str, shape) -> torch.Tensor:
    make = torch.Generator().manual_seed(1)
    scores = torch.randn(shape, generator=make)
    if kind == "ties":
        scores = scores.mul(2).round()
        scores[..., ::3] *= -0.0
    elif kind == "zeros":
        # Of both signs, and nothing above them.
        scores = -scores.abs()
        scores[..., ::3] = -0.0
        scores[..., 1::5] = 0.0
    elif kind == "equal":
        scores = torch.zeros(shape)
    elif kind == "infinite":
        scores[..., ::5] = torch.inf
        scores[..., 1::4] = -torch.inf
        scores[..., 2::7] = torch.nan
        scores[..., 3::11] = -torch.nan
    elif kind == "tiny":
        scores = scores * 1e-42
    elif kind == "close":
        scores = 1 + torch.randint(0, 9, shape, generator=make) * 2**-23
    elif kind == "periodic":
        # As many groups as are chosen have all that is large.
        scores[..., ::2] += 100
    return scores.to(DEVICE)


KINDS = ["random", "ties", "zeros", "equal", "infinite", "tiny", "close", "periodic"]


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("kind", "topk"),
    [(kind, 20) for kind in KINDS]
    + [(kind, topk) for kind in ("ties", "infinite", "periodic") for topk in (1, 32)],
)
def test_choice(kind, topk, monkeypatch):
    """The bits of the reference, also where scores are not seen or not numbers.

    With few groups, so that more scores than groups reach the bound in some; in several pieces.
    """
    sizes = {"tile": 128, "chunk": 32}
    small = {"_GROUPS": 16, "_MULTIPROCESSORS": 1, "_KEPT": 16}
    small |= {
        name: getattr(radix_select, name)._replace(segments=segments, **sizes)
        for name, segments in (("_SHARED", 4), ("_ALONE", 2))
    }
    for name, value in small.items():
        monkeypatch.setattr(radix_select, name, value)
    for span in (Span(0, 1, 5, 1205, 1190), Span(0, 2, 0, 90, 18), Span(0, 1, 3, 140, None)):
        keys = VisibleKeys(span, DEVICE, heads=1)
        scores = hostile_scores(kind, (1, span.num_queries, span.num_keys))
        expected = best_keys(scores, keys, topk).transpose(0, 1)
        with poisoned_memory():
            found = selection_triton.triton_best_keys(scores, keys, topk)
        assert torch.equal(found, expected)


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", KINDS)
def test_choice_at_full_size(kind):
    """Of 6001 keys, and by as many programs as share multiprocessors on a GPU."""
    queries = 200 if DEVICE.type == "cuda" else 1
    keys = VisibleKeys(Span(0, queries, 0, 6001, 6001 - queries), DEVICE, heads=1)
    scores = hostile_scores(kind, (1, queries, 6001))
    expected = best_keys(scores, keys, 2048).transpose(0, 1)
    # The row behind the last query's is no one's.
    out = torch.full((queries + 1, 1, 2048), -7, dtype=torch.int32, device=DEVICE)
    radix_select.radix_select(scores, 2048, 0, 6001 - queries, out=out[:-1])
    assert torch.equal(out[:-1], expected)
    assert (out[-1] == -7).all()


def test_too_many_keys_to_choose():
    with pytest.raises(ValueError, match="topk must be at most 8192, got 8193"):
        radix_select.radix_select(torch.zeros(1, 1, 1), 8193, 0, None)


@pytest.mark.no_cover
@pytest.mark.parametrize("elements", [100, 2**24])
def test_selection(elements):
    """Sequences in a pack, chunk by chunk."""
    index = vectors(20, 20, batch=2)
    spans = Spans([Span(0, 4, 0, 4, 0), Span(7, 20, 7, 20, 0)])
    expected = select(index, spans, 5, relu=True, scores=selection_triton.triton_index_scores)
    found = selection_triton.triton_select(index, spans, 5, relu=True, elements=elements)
    assert torch.equal(found, expected)


@pytest.mark.no_cover
@grid(
    1,
    {
        "kind": ("visible", "chosen", "in_order", "wide"),
        "dtype": (torch.bfloat16, torch.float32),
        "relu": (True, False),
    },
)
def test_gradients(kind, dtype, relu, monkeypatch):
    """Added to what the keys have; queries and weights of other chunks are left alone."""
    monkeypatch.setattr(index_chosen, "_MOST_HEADS", 16)
    monkeypatch.setattr(scatter_add, "_MOST_BYTES", 120_000)  # several runs of queries
    # Keys of wide rows get half of their columns at a time.
    width = 128 if kind == "wide" else 16
    index = vectors(9, 72, batch=2, heads=20, width=width, dtype=dtype)
    # Products of 0, where a ReLU has no gradient.
    index.query[:, :, 3] = 0.0
    if kind == "visible":
        subset = VisibleKeys(Span(1, 8, 3, 72, 62), DEVICE, heads=100)
    else:
        chosen = torch.rand(7, 2, 72).topk(67).indices.sort().values.int().to(DEVICE)
        chosen[2, 1] = -1
        chosen[3, :, 5:9] = -1
        subset = ChosenKeys(slice(1, 8), chosen, 100)
    double = IndexVectors(*(x.double() for x in index))
    scores = index_scores(double, subset, relu)
    seen = subset.seen.expand(scores.shape)
    found = indexer_triton.triton_scores(index, subset, relu)
    assert relative_error(found[seen].double(), scores[seen]) < 1e-6

    make = torch.Generator().manual_seed(3)
    score_grad = torch.randn(scores.shape, generator=make).to(DEVICE).masked_fill(~seen, 0.0)
    truth = IndexVectors(*(torch.ones_like(x) for x in double))
    add_index_gradient(truth, score_grad.double(), double, subset, relu)
    kept = IndexVectors(*(torch.ones_like(x, dtype=torch.float32) for x in index))
    torch.use_deterministic_algorithms(kind == "in_order")
    indexer_triton.triton_add_index_gradient(kept, score_grad, index, subset, relu)
    bound = 1e-5 if dtype == torch.float32 else 4e-3
    for name, actual, expected in zip(index._fields, kept, truth):
        assert relative_error(actual.double(), expected) < bound, name
        assert name == "key" or (actual[[0, 8]] == 1).all()
