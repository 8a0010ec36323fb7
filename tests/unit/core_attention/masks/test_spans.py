"""Splitting spans by queries, and merging attention over parts of the keys."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from absorbed_mla.core_attention.merge import merge
from tests.support.spans import any_span, pairs_in


@given(any_span(), st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_chunks_of_queries(span, size):
    """All chunks together see what the span saw, and none holds keys that it does not see."""
    seen = []
    for first in range(span.query_start, span.query_end, size):
        last = min(first + size, span.query_end)
        chunk = span.within_queries(first, last)
        found = pairs_in((chunk,))
        assert {key for _, key in found} == set(range(chunk.key_start, chunk.key_end))
        seen += found
    assert sorted(seen) == sorted(pairs_in((span,)))


@given(any_span())
@settings(max_examples=300, deadline=None)
def test_number_of_pairs(span):
    """As many as there are."""
    assert span.num_pairs == len(pairs_in((span,)))


def attention(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [S, 1, 1, V] and LSE [S, 1, 1] from scores [S, K]; -inf hides a key."""
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[:, None])
    return (weights @ values)[:, None, None], lse[:, None, None]


@pytest.mark.parametrize("offset", [0.0, -800.0, 800.0])
@pytest.mark.parametrize("cuts", [(0, 9), (3, 9), (1, 4), (0, 0), (9, 9)])
def test_merged_parts_are_the_whole(cuts, offset):
    """Also parts without a key, rows that see nothing of one or of any, and scores that overflow
    every exponential but the last."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(5, 9, generator=generator, dtype=torch.float64) * 4
    scores[:, 4:] += offset
    scores[1] = -torch.inf
    scores[2, :3] = -torch.inf
    scores[3, 3:] = -torch.inf
    values = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    bounds = [0, *cuts, 9]
    parts = [attention(scores[:, a:b], values[a:b]) for a, b in itertools.pairwise(bounds)]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge(out, lse, *part)
    expected_out, expected_lse = attention(scores, values)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    assert not out[1].any() and lse[1].item() == -torch.inf


def test_parts_of_low_precision_are_merged_in_the_accumulators():
    out, part = torch.full((1, 1, 1, 1), 1 / 3), torch.full((1, 1, 1, 1), 1.0, dtype=torch.bfloat16)
    lse = torch.zeros(1, 1, 1)
    merged, total = merge(out, lse, part, lse)
    assert merged.dtype == total.dtype == torch.float32
    torch.testing.assert_close(merged, torch.full_like(out, 2 / 3))
