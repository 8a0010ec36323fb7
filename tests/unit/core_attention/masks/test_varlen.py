"""Calls of kernels for several sequences, or for dense blocks, hold exactly what the spans see."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from absorbed_mla.core_attention.backends.cudnn import dense_blocks
from absorbed_mla.core_attention.masks.spans import Spans, self_attention_spans
from absorbed_mla.core_attention.masks.varlen import varlen_calls
from absorbed_mla.sequences import SequenceLayout
from tests.support.spans import any_span, any_spans, pairs_in


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
@settings(max_examples=300, deadline=None)
def test_calls_hold_what_the_spans_see(found):
    pairs = [pair for call in varlen_calls(Spans(found), True) for pair in pairs_of(call)]
    assert sorted(pairs) == sorted(pairs_in(found))


def test_a_pack_is_one_call():
    layout = SequenceLayout(30, (0, 10, 20), (7, 10, 1), (10, 10, 10), packed=True)
    [call] = varlen_calls(self_attention_spans(layout, causal=True), True)
    assert call.causal and call.longest == (10, 10)


@given(any_span())
@settings(max_examples=300, deadline=None)
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
