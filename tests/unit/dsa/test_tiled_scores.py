"""Scores of parity mode: the same bits in a whole sequence, a chunk, a pack and a decode."""

import pytest
import torch

from absorbed_mla.core_attention.masks.spans import Span, Spans, self_attention_spans
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.key_subset import VisibleKeys, visible_keys
from absorbed_mla.dsa.scores import index_scores
from absorbed_mla.dsa.selection import select
from absorbed_mla.dsa.tiled_scores import tiled_index_scores
from absorbed_mla.sequences import SequenceLayout
from tests.support.numerics import relative_error

CPU = torch.device("cpu")  # on a GPU, products in PyTorch have no fixed order
TOKENS = 150
# Heads and width whose rows are whole cache lines, and such that are not.
WIDTHS = [(64, 128), (16, 32), (3, 20), (1, 8)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def random_index(heads: int, width: int, dtype: torch.dtype) -> IndexVectors:
    compute = torch.promote_types(dtype, torch.float32)
    return IndexVectors(
        torch.randn(TOKENS, 1, heads, width).to(dtype),
        torch.randn(TOKENS, 1, width).to(dtype),
        torch.randn(TOKENS, 1, heads).to(compute),
    )


def rows(index: IndexVectors, queries: slice) -> IndexVectors:
    return IndexVectors(index.query[queries], index.key, index.weights[queries])


def scores_of(index: IndexVectors, span: Span):
    return tiled_index_scores(index, VisibleKeys(span, CPU, 1), True)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
class TestBits:
    def test_are_those_of_the_definition(self, widths, dtype):
        index = random_index(*widths, dtype)
        keys = VisibleKeys(Span(0, TOKENS, 0, TOKENS, 0), CPU, 1)
        expected = index_scores(index, keys, True)
        assert relative_error(tiled_index_scores(index, keys, True), expected) < 1e-5

    @pytest.mark.parametrize("first", [1, 2, 33, TOKENS - 1])
    def test_queries_alone(self, widths, dtype, first):
        """Prefill of a suffix, and the decode of one token, over cached keys."""
        index = random_index(*widths, dtype)
        whole = scores_of(index, Span(0, TOKENS, 0, TOKENS, 0))
        count = TOKENS - first
        part = scores_of(rows(index, slice(first, None)), Span(0, count, 0, TOKENS, first))
        assert torch.equal(part, whole[first:])

    @pytest.mark.parametrize("before", [1, 63, 70])
    def test_in_a_pack(self, widths, dtype, before):
        """Other sequences before and after, and fewer keys: those behind are not read."""
        index = random_index(*widths, dtype)
        length = TOKENS - before - 3
        other = IndexVectors(*(x[before : before + length] for x in index))
        alone = scores_of(other, Span(0, length, 0, length, 0))
        end = before + length
        packed = scores_of(index, Span(before, end, before, end, 0))
        assert torch.equal(packed, alone)
        short = scores_of(other, Span(0, 5, 0, 9, 4))
        assert torch.equal(short, alone[:5, :9])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selection(dtype):
    """Decoded one by one over a cache, tokens choose what they chose in training."""
    index = random_index(16, 32, dtype)
    spans = self_attention_spans(SequenceLayout.dense(TOKENS), True)
    how = {"relu": True, "scores": tiled_index_scores}
    trained = select(index, spans, 20, **how)
    assert torch.equal(select(index, spans, 20, elements=100, **how), trained)
    for token in (19, 20, 77, TOKENS - 1):
        cached = IndexVectors(
            index.query[token : token + 1], index.key[: token + 1], index.weights[token : token + 1]
        )
        decode = Spans([Span(0, 1, 0, token + 1, None)])
        assert torch.equal(select(cached, decode, 20, **how)[0], trained[token])
    assert len([*visible_keys(spans, 1, CPU, 100)]) > 1
