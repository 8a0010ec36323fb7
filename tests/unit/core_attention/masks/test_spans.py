"""Spans cut by queries, into calls of kernels, and into blocks; merging over parts of the keys."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from absorbed_mla.core_attention.backends.cudnn import dense_blocks
from absorbed_mla.core_attention.masks.spans import Spans, self_attention_spans
from absorbed_mla.core_attention.masks.varlen import varlen_calls
from absorbed_mla.core_attention.merge import merge
from absorbed_mla.core_attention.shared_prefix import joined
from absorbed_mla.sequences import SequenceLayout
from tests.support.layouts import TREES, tree_layout
from tests.support.spans import any_span, any_spans, pairs_in

often = settings(max_examples=300, deadline=None)


@given(any_span(), st.integers(1, 6))
@often
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
@often
def test_number_of_pairs(span):
    assert span.num_pairs == len(pairs_in((span,)))


def pairs_of(call) -> list[tuple[int, int]]:
    """Pairs by the boundaries that a kernel gets."""
    cu_q, cu_k, used_q, used_k = (x.tolist() for x in call.starts(torch.device("cpu")))
    pairs = []
    for i, (queries, keys) in enumerate(zip(used_q, used_k)):
        assert cu_q[i] + queries <= cu_q[i + 1] and cu_k[i] + keys <= cu_k[i + 1]
        for q in range(queries):
            for k in range(keys):
                if not call.causal or k - q <= keys - queries:
                    pairs.append((call.queries.start + cu_q[i] + q, call.keys.start + cu_k[i] + k))
    return pairs


@given(any_spans())
@often
def test_calls_hold_what_the_spans_see(found):
    pairs = [pair for call in varlen_calls(Spans(found), True) for pair in pairs_of(call)]
    assert sorted(pairs) == sorted(pairs_in(found))


def test_a_pack_is_one_call():
    layout = SequenceLayout(30, (0, 10, 20), (7, 10, 1), (10, 10, 10), packed=True)
    [call] = varlen_calls(self_attention_spans(layout, causal=True), True)
    assert call.causal and call.longest == (10, 10)


@given(any_span())
@often
def test_blocks_hold_what_the_span_sees(span):
    """A causal block is square, every query comes first exactly once."""
    seen, first = [], []
    for block in dense_blocks(Spans([span])):
        queries = range(block.queries.start, block.queries.stop)
        keys = range(block.keys.start, block.keys.stop)
        assert len(queries) and len(keys)
        assert len(queries) == len(keys) or not block.causal
        seen += [
            (q, k)
            for i, q in enumerate(queries)
            for j, k in enumerate(keys)
            if j <= i or not block.causal
        ]
        first += queries if block.first else []
        assert set(queries) <= set(first)
    assert sorted(seen) == sorted(pairs_in((span,)))
    assert first == list(range(span.query_start, span.query_end))


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


@pytest.mark.parametrize("name", TREES)
def test_shared_prefixes_in_one_call(name):
    """Each key is in one span, whose queries are one run; not where padding lies between them."""
    given = tree_layout(name, 2)
    layout = SequenceLayout.from_host(given.packed_seq_params(torch.device("cpu")), given.tokens)
    spans = self_attention_spans(layout, causal=True)
    together = joined(spans)
    assert (together is None) == ("padded" in name)
    if together is not None:
        assert len(together) == len(spans) and joined(spans) is together
        levels = [pair for level in (spans, *spans.further) for pair in pairs_in(level)]
        assert sorted(pairs_in(together)) == sorted(levels)
