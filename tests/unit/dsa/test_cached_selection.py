"""The choice among cached keys is that of training, for rows of any lengths and any blocks."""

import pytest
import torch

from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.dsa import cached_selection
from absorbed_mla.dsa.cached_keys import CachedRows
from absorbed_mla.dsa.cached_selection import select_cached
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.scores import index_scores
from absorbed_mla.dsa.selection import select
from absorbed_mla.dsa.tiled_scores import tiled_cached_scores, tiled_index_scores
from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import RowLengths
from tests.support.inference import PagedStep

HEADS, WIDTH, TOPK, BLOCK = 3, 8, 6, 4
# New tokens and keys: prefill, a chunk, decode, padding, drafts, a row with fewer than top-k.
LENGTHS = RowLengths((9, 5, 1, 0, 3, 4), (9, 90, 71, 0, 20, 5))
PADDING = 2


class Case:
    """Index vectors of some requests, in a cache with NaN in all unused places."""

    def __init__(self, dtype: torch.dtype = torch.float64, strided: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            # Few different numbers, so that many scores are equal.
            return torch.randint(-2, 3, shape, generator=generator).to(dtype)

        tokens = sum(LENGTHS.queries)
        self.query = random(tokens + PADDING, HEADS, WIDTH)
        self.query[tokens:] = torch.nan
        self.weights = random(tokens + PADDING, HEADS)
        self.keys = [random(count, WIDTH) for count in LENGTHS.keys]
        step = PagedStep(LENGTHS, self.keys, BLOCK)
        self.rows, self.cache = step.rows, step.cache
        if strided:
            # As a static context has it: positions before requests.
            self.cache = self.cache.transpose(0, 1).contiguous().transpose(0, 1)

    def select(self, **how) -> torch.Tensor:
        return select_cached(
            self.query, self.weights, self.cache, self.rows, TOPK, relu=True, **how
        )

    def as_in_training(self, **how) -> torch.Tensor:
        """Row by row, with the keys in order."""
        found, first = [], 0
        for queries, keys in zip(LENGTHS.queries, self.keys):
            own = slice(first, first + queries)
            first += queries
            index = IndexVectors(self.query[own, None], keys[:, None], self.weights[own, None])
            span = Span(0, queries, 0, len(keys), causal_offset=len(keys) - queries)
            spans = Spans([span] if queries else [])
            found.append(select(index, spans, TOPK, relu=True, **how)[:, 0])
        found.append(found[0].new_full((PADDING, TOPK), -1))
        return torch.cat(found)


@pytest.mark.parametrize("elements", [1, 300, 2**24])
@pytest.mark.parametrize("strided", [False, True])
def test_selection_of_training(elements, strided):
    """Whatever fits into a chunk."""
    case = Case(strided=strided)
    found = case.select(elements=elements)
    assert found.dtype == torch.int32
    assert torch.equal(found, case.as_in_training())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiled(dtype):
    """The same scores to the bit, in whatever chunks."""
    case = Case(torch.float32)
    noise = torch.Generator().manual_seed(1)
    case.query += torch.randn(case.query.shape, generator=noise) / 7
    found = case.select(scores=tiled_cached_scores, elements=300)
    assert torch.equal(found, case.as_in_training(scores=tiled_index_scores))


def test_no_large_tensor(monkeypatch):
    """Neither scores nor gathered keys of all tokens with all keys."""
    sizes = []
    take = cached_selection.ChosenKeys.take
    monkeypatch.setattr(
        cached_selection.ChosenKeys,
        "take",
        lambda self, rows: (sizes.append(taken := take(self, rows)), taken)[1],
    )

    def scores(index, keys, relu):
        found = index_scores(index, keys, relu)
        sizes.append(found)
        return found

    elements = 64 * WIDTH
    Case().select(elements=elements, scores=scores)
    assert max(tensor.numel() for tensor in sizes) <= elements


def test_bound_of_the_host():
    """Where no row can have more than top-k keys, nothing is compared."""
    rows = Rows.of((2, 1), (4, 6), torch.zeros(2, 1, dtype=torch.int32))
    query = torch.full((3, HEADS, WIDTH), torch.nan)
    found = select_cached(query, query[..., 0], query[:1], rows, TOPK, relu=True)
    expected = [[0, 1, 2, -1, -1, -1], [0, 1, 2, 3, -1, -1], [0, 1, 2, 3, 4, 5]]
    assert found.tolist() == expected


@pytest.mark.parametrize("requests", [slice(0, 3), slice(1, 2)])
def test_slots(requests):
    """Rows of the memory that a cache is a view of; nothing is copied."""
    memory = torch.arange(5 * 3 * 2).view(5, 3, 2)
    cache = memory[:, requests].transpose(0, 1)
    cached = CachedRows(cache)
    positions = torch.tensor([[0, 4, -1], [2, 3, 1]], dtype=torch.int32)[: len(cache)]
    tables = torch.arange(len(cache), dtype=torch.int32)[:, None]
    # With blocks of five positions a table of one column is enough.
    slots = cached.slots(positions, tables)
    assert torch.equal(slots == -1, positions == -1)
    assert cached.rows.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    for row, places in enumerate(slots.tolist()):
        for place, position in zip(places, positions[row].tolist()):
            if place >= 0:
                assert torch.equal(cached.rows[place, 0], cache[row, position])
