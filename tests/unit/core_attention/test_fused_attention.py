"""A backend made of dense pieces: what is cut must come together, whatever the kernel.

The kernel here is PyTorch's own arithmetic in float64; cuDNN's runs where there is a GPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from absorbed_mla.core_attention.backends.fused import FusedBackend
from absorbed_mla.core_attention.masks.pieces import pieces
from hypothesis import given, settings
from torch import Tensor

from absorbed_mla.core_attention.backend import ReferenceBackend
from absorbed_mla.core_attention.backends.cudnn import CudnnKernel
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from tests.support import needs, world
from tests.support.differentiable import attention
from tests.support.numerics import bounds_from_eager, compare, relative_error
from tests.unit.context_parallel.test_context_parallel_layout import pairs_in
from tests.unit.core_attention.test_spans import spans


@given(spans())
@settings(max_examples=400, deadline=None)
def test_pieces_hold_what_the_span_sees(span):
    """A causal piece is square, every query comes first exactly once."""
    seen, first = [], []
    for piece in pieces([span]):
        queries = range(piece.queries.start, piece.queries.stop)
        keys = range(piece.keys.start, piece.keys.stop)
        assert len(queries) and len(keys)
        assert len(queries) == len(keys) or not piece.causal
        seen += [
            (q, k)
            for i, q in enumerate(queries)
            for j, k in enumerate(keys)
            if j <= i or not piece.causal
        ]
        first += queries if piece.first else []
        assert set(queries) <= set(first)
    assert sorted(seen) == sorted(pairs_in((span,)))
    assert first == list(range(span.query_start, span.query_end))


class PlainKernel:
    """What cuDNN computes, in plain PyTorch; backward from the LSE it is given."""

    def probabilities(self, q, k, causal, scale, lse=None):
        scores = torch.einsum("qbnd,kbnd->qbnk", q, k).double() * scale
        if causal:
            hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        lse = scores.logsumexp(-1) if lse is None else lse
        return (scores - lse[..., None]).exp(), lse

    def forward(self, q, k, v, causal, scale):
        probs, lse = self.probabilities(q, k, causal, scale)
        return torch.einsum("qbnk,kbnv->qbnv", probs, v.double()), lse

    def backward(self, grad_out, q, k, v, out, lse, causal, scale):
        q, k, v, out, grad_out = (x.double() for x in (q, k, v, out, grad_out))
        probs, _ = self.probabilities(q, k, causal, scale, lse)
        dv = torch.einsum("qbnk,qbnv->kbnv", probs, grad_out)
        dprobs = torch.einsum("qbnv,kbnv->qbnk", grad_out, v)
        dscores = probs * (dprobs - (grad_out * out).sum(-1, keepdim=True)) * scale
        dq = torch.einsum("qbnk,kbnd->qbnd", dscores, k)
        return dq, torch.einsum("qbnk,qbnd->kbnd", dscores, q), dv


SPANS = {
    "causal": (Span(0, 24, 0, 24, 0),),
    "all_keys": (Span(0, 24, 0, 24, None),),
    "zigzag": (Span(0, 8, 0, 8, 0), Span(8, 16, 0, 32, 24), Span(16, 24, 3, 9, None)),
    "window": (Span(2, 14, 4, 12, 3),),
    "one_token": (Span(0, 1, 0, 1, 0), Span(1, 3, 1, 3, 0), Span(4, 5, 4, 7, None)),
    "padding": (Span(0, 5, 0, 5, 0), Span(8, 17, 8, 17, 0)),
}
WIDTHS = {"nope": 16, "rope": 8, "v": 16}


def operands(dtype: torch.dtype, seed: int = 0, widths: dict = WIDTHS) -> list[Tensor]:
    """q_content, q_rope, k_content, k_rope, value of 24 queries and 32 keys."""
    generator = torch.Generator().manual_seed(seed)
    heads, batch = 3, 2
    shapes = [(24, batch, heads, widths["nope"]), (24, batch, heads, widths["rope"])]
    shapes += [(32, batch, heads, widths["nope"]), (32, batch, widths["rope"])]
    shapes += [(32, batch, heads, widths["v"])]
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [x.to(world.device()).requires_grad_() for x in leaves]


def outcome(backend, leaves: list[Tensor], rules: ScoreRules, lse_weight: float = 0.0) -> dict:
    """Output, LSE and gradients by name."""
    out, lse = attention(*leaves, rules, backend)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    loss = (out * weights).sum()
    if lse_weight:
        loss = loss + lse_weight * lse.masked_fill(lse == -torch.inf, 0).sum()
    grads = torch.autograd.grad(loss, leaves)
    finite = lse.masked_fill(lse == -torch.inf, -1e9)
    return dict(zip(("out", "lse", "dqc", "dqr", "dkc", "dkr", "dv"), (out, finite, *grads)))


@pytest.mark.parametrize("lse_weight", [0.0, 0.3])
@pytest.mark.parametrize("name", SPANS)
def test_equals_the_reference(name, lse_weight):
    """The accumulators are fp32."""
    rules, leaves = ScoreRules(0.3, SPANS[name], query_chunk_size=5), operands(torch.float64)
    expected = outcome(ReferenceBackend(), leaves, rules, lse_weight)
    actual = outcome(FusedBackend("plain", PlainKernel()), leaves, rules, lse_weight)
    for key, tensor in expected.items():
        assert relative_error(actual[key].double(), tensor.double()) < 1e-6, key


@needs.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SPANS)
def test_cudnn(name, dtype):
    """No worse than three plain evaluations at the same precision."""
    rules = ScoreRules(1 / math.sqrt(24), SPANS[name])
    leaves = operands(dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = outcome(ReferenceBackend(), wide, rules)
    eager = outcome(ReferenceBackend(), leaves, rules)
    actual = outcome(FusedBackend("cudnn", CudnnKernel()), leaves, rules)
    compare(actual, exact, bounds_from_eager(eager, exact, dtype)).check()
