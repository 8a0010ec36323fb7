"""One call for many sequences: waves hold what spans see, and FlashAttention is called as it is.

Without a GPU a stand-in with the signatures of flash-attn-4's functions computes in float64, by
sequence boundaries as the package documents them; on a GPU the package itself runs as well.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from absorbed_mla.core_attention.backend import ReferenceBackend
from absorbed_mla.core_attention.backends import flash_attention_4 as flash_attention
from absorbed_mla.core_attention.backends.flash_attention_4 import FlashAttention4
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import self_attention_spans
from absorbed_mla.core_attention.masks.varlen import boundaries, waves
from absorbed_mla.sequences import SequenceLayout
from tests.support import needs
from tests.support.backends import determinism
from tests.support.numerics import bounds_from_eager, compare, relative_error
from tests.unit.context_parallel.test_context_parallel_layout import pairs_in
from tests.unit.core_attention.test_fused_attention import SPANS, operands, outcome
from tests.unit.core_attention.test_spans import spans


@st.composite
def span_lists(draw):
    """Queries one span after the other, keys anywhere."""
    found, first = [], 0
    for span in draw(st.lists(spans(), min_size=1, max_size=6)):
        size = span.query_end - span.query_start
        first += draw(st.integers(0, 3))
        moved = type(span)(first, first + size, span.key_start, span.key_end, span.causal_offset)
        found.append(moved)
        first += size
    return tuple(found)


def pairs_of(wave) -> list[tuple[int, int]]:
    """Pairs by the boundaries that a kernel gets."""
    cu_q, cu_k, used_q, used_k = (x.tolist() for x in boundaries(wave, torch.device("cpu")))
    pairs = []
    for i, (queries, keys) in enumerate(zip(used_q, used_k)):
        assert cu_q[i] + queries <= cu_q[i + 1] and cu_k[i] + keys <= cu_k[i + 1]
        for q in range(queries):
            for k in range(keys):
                if not wave.causal or k - q <= keys - queries:
                    pairs.append((wave.queries.start + cu_q[i] + q, wave.keys.start + cu_k[i] + k))
    return pairs


@given(span_lists())
@settings(max_examples=400, deadline=None)
def test_waves_hold_what_the_spans_see(found):
    pairs = [pair for wave in waves(found, True) for pair in pairs_of(wave)]
    assert sorted(pairs) == sorted(pairs_in(found))


def test_a_pack_is_one_wave():
    layout = SequenceLayout(30, (0, 10, 20), (7, 10, 1), (10, 10, 10), packed=True)
    [wave] = waves(self_attention_spans(layout, causal=True), True)
    assert wave.causal and wave.longest == (10, 10)


class StandIn:
    """flash_attn.cute.interface, as far as it is used."""

    def __init__(self) -> None:
        self.calls = 0
        self.deterministic: set[bool] = set()

    def sequences(self, q, k, lengths):
        """Views (batch or one of it, queries, keys) of every sequence."""
        if not lengths:
            return [(..., slice(None), slice(None))]
        cu_q, cu_k, n_q, n_k = (
            lengths[name].tolist()
            for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
        )
        assert lengths["max_seqlen_q"] == max(n_q) and lengths["max_seqlen_k"] == max(n_k)
        return [
            (None, slice(a, a + n), slice(b, b + m)) for a, b, n, m in zip(cu_q, cu_k, n_q, n_k)
        ]

    def scores(self, q, k, scale, causal):
        scores = torch.einsum("...qnd,...knd->...nqk", q, k).double() * scale
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(hidden.triu(1 + k.shape[-3] - q.shape[-3]), -torch.inf)
        return scores

    def _flash_attn_fwd(self, q, k, v, *, softmax_scale, causal, out, lse, **lengths):
        self.calls += 1
        assert lse.is_contiguous() and all(x.stride(-1) == 1 for x in (q, k, v, out))
        for _, queries, keys in self.sequences(q, k, lengths):
            rows, columns = (
                (..., queries, slice(None), slice(None)),
                (..., keys, slice(None), slice(None)),
            )
            scores = self.scores(q[rows], k[columns], softmax_scale, causal)
            found = scores.logsumexp(-1)
            lse[..., queries] = found.to(lse.dtype)
            probs = (scores - found[..., None]).exp()
            out[rows] = torch.einsum("...nqk,...knv->...qnv", probs, v[columns].double()).to(out)

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, *, softmax_scale, causal, deterministic, dlse, dq, dk, dv,
        **lengths,
    ):  # fmt: skip
        self.calls += 1
        self.deterministic.add(deterministic)
        assert lse.is_contiguous() and (dlse is None or dlse.shape == lse.shape)
        for _, queries, keys in self.sequences(q, k, lengths):
            rows, columns = (
                (..., queries, slice(None), slice(None)),
                (..., keys, slice(None), slice(None)),
            )
            scores = self.scores(q[rows], k[columns], softmax_scale, causal)
            probs = (scores - lse[..., queries, None].double()).exp()
            grad = dout[rows].double()
            dprobs = torch.einsum("...qnv,...knv->...nqk", grad, v[columns].double())
            delta = torch.einsum("...qnv,...qnv->...nq", grad, out[rows].double())
            if dlse is not None:
                delta = delta - dlse[..., queries]
            ds = probs * (dprobs - delta[..., None]) * softmax_scale
            dv[columns] = torch.einsum("...nqk,...qnv->...knv", probs, grad).to(dv)
            dq[rows] = torch.einsum("...nqk,...knd->...qnd", ds, k[columns].double()).to(dq)
            dk[columns] = torch.einsum("...nqk,...qnd->...knd", ds, q[rows].double()).to(dk)


@pytest.fixture()
def stand_in(monkeypatch) -> StandIn:
    return install_stand_in(monkeypatch)


def install_stand_in(monkeypatch) -> StandIn:
    """In place of the package, whether or not there is one."""
    module = StandIn()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    return module


def first_of(leaves):
    """The first entry of the batch."""
    return [x[:, :1].detach().requires_grad_() for x in leaves]


@pytest.mark.parametrize("lse_weight", [0.0, 0.3])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", SPANS)
def test_equals_the_reference(name, batch, lse_weight, stand_in):
    rules, leaves = ScoreRules(0.3, SPANS[name], query_chunk_size=5), operands(torch.float64)
    leaves = first_of(leaves) if batch == 1 else leaves
    expected = outcome(ReferenceBackend(), leaves, rules, lse_weight)
    actual = outcome(FlashAttention4(), leaves, rules, lse_weight)
    assert stand_in.calls == 2 * len(waves(rules.spans, batch == 1))
    for key, tensor in expected.items():
        assert relative_error(actual[key].double(), tensor.double()) < 1e-6, key


@pytest.mark.parametrize(
    ("demanded", "warn_only", "expected"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_repeats_to_the_bit_where_it_must(demanded, warn_only, expected, stand_in):
    """Otherwise gradients differ from run to run, or cost more than they need to."""
    with determinism(demanded, warn_only):
        outcome(FlashAttention4(), operands(torch.float64), ScoreRules(0.3, SPANS["zigzag"]))
    assert stand_in.deterministic == {expected}


@needs.gpu_with("flash-attn-4", flash_attention.refusal(192, 128))
class TestOnAGPU:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("lse_weight", [0.0, 0.3])
    @pytest.mark.parametrize("name", SPANS)
    def test_layouts(self, name, lse_weight, dtype):
        self.check(SPANS[name], {"nope": 128, "rope": 64, "v": 128}, lse_weight, dtype)

    @pytest.mark.parametrize("width", [64, 128])
    def test_widths(self, width):
        widths = {"nope": width - 32, "rope": 32, "v": width}
        self.check(SPANS["zigzag"], widths, 0.3, torch.bfloat16)

    def check(self, spans, widths, lse_weight, dtype):
        """No worse than three plain evaluations at the same precision."""
        rules, leaves = ScoreRules(1 / math.sqrt(192), spans), operands(dtype, widths=widths)
        if dtype == torch.bfloat16:
            leaves = first_of(leaves)
        wide = [x.detach().double().requires_grad_() for x in leaves]
        exact = outcome(ReferenceBackend(), wide, rules, lse_weight)
        eager = outcome(ReferenceBackend(), leaves, rules, lse_weight)
        actual = outcome(FlashAttention4(), leaves, rules, lse_weight)
        compare(actual, exact, bounds_from_eager(eager, exact, dtype)).check()
