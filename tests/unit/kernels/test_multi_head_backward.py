"""The multi-head backward for Hopper, emulated: products, waits, masks, and what goes where.

What the emulation cannot run is the instruction that adds four numbers to memory; where they go is
written out once more in tests/support/multi_head_backward.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from absorbed_mla.core_attention.backends.reference import ReferenceBackend
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.masks.tiles import key_tiles
from absorbed_mla.core_attention.types import AttentionInputs, OutputGradient
from absorbed_mla.core_attention.window import WindowedBackend
from tests.support import needs
from tests.support.hostile import poisoned_memory
from tests.support.multi_head import WINDOWS
from tests.support.multi_head_backward import emulate_backward

pytest.importorskip("triton.experimental.gluon")
pytestmark = [pytest.mark.no_cover, pytest.mark.skipif(needs.HAS_GPU, reason="a GPU runs them")]

from absorbed_mla.kernels.hopper import multi_head_backward  # noqa: E402

SCALE = 0.11


@dataclass(frozen=True)
class Case:
    """One call: sizes, spans, and whether the LSE has a gradient."""

    queries: int
    keys: int
    spans: tuple[Span, ...]
    content: int = 64
    rope: int = 64
    value: int = 128
    heads: int = 2
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    lse_gradient: bool = False
    window: int | None = None


CASES = {
    "causal": Case(200, 200, (Span(0, 200, 0, 200, 0),), content=128),
    "causal_of_one_block": Case(33, 33, (Span(0, 33, 0, 33, 0),), batch=2, lse_gradient=True),
    "five_blocks": Case(300, 70, (Span(0, 300, 0, 70, None),), content=128),
    "offset": Case(70, 300, (Span(0, 70, 0, 300, 230),), rope=32, value=64),
    "fp16": Case(130, 256, (Span(0, 130, 0, 256, None),), dtype=torch.float16, lse_gradient=True),
    "packs": Case(
        300,
        300,
        (Span(3, 60, 3, 60, 0), Span(60, 199, 60, 199, 0), Span(210, 299, 210, 299, 0)),
        content=128,
        batch=2,
    ),
    "shared_keys": Case(
        256,
        384,
        (Span(0, 128, 0, 192, 64), Span(128, 256, 0, 384, 256)),
        content=128,
        lse_gradient=True,
    ),
    "keys_that_nobody_sees": Case(140, 400, (Span(5, 140, 7, 300, 50),)),
    "queries_that_see_nothing": Case(200, 60, (Span(0, 200, 0, 60, -70),)),
    "nobody_sees_anything": Case(64, 130, (Span(0, 64, 0, 130, -64),)),
    "no_span": Case(10, 20, ()),
    "no_queries": Case(0, 20, ()),
}
CASES |= {
    f"window_{name}": Case(q, k, spans, rope=32, value=64, window=window)
    for name, (q, k, spans, window) in WINDOWS.items()
}


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulate_backward(monkeypatch)


def operands(case: Case) -> SimpleNamespace:
    """Of the case; what is in no span is NaN."""
    generator = torch.Generator().manual_seed(1)
    width = case.content + case.rope

    def random(tokens: int, *last: int) -> Tensor:
        shape = tokens, case.batch, case.heads, *last
        return torch.randn(shape, generator=generator).to(case.dtype)

    q, grad_out = random(case.queries, width), random(case.queries, case.value)
    k, v = random(case.keys, width), random(case.keys, case.value)
    grad_lse = random(case.queries).float() if case.lse_gradient else None
    rules = ScoreRules(SCALE, Spans(case.spans))
    exact = AttentionInputs.multi_head(*(x.double() for x in (q, k, v)))
    backend = ReferenceBackend()
    backend = WindowedBackend(backend, case.window) if case.window else backend
    output = backend.forward(exact, rules)
    gradient = OutputGradient(grad_out.double(), None if grad_lse is None else grad_lse.double())
    expected = backend.backward(gradient, output, exact, rules).as_multi_head()
    seen_queries, seen_keys = torch.zeros(case.queries).bool(), torch.zeros(case.keys).bool()
    for span in case.spans:
        seen_queries[span.query_start : span.query_end] = True
        seen_keys[span.key_start : span.key_end] = True
    out, lse = output.out.to(case.dtype), output.lse.float()
    for x in (q, grad_out, out):
        x[~seen_queries] = torch.nan
    for x in (k, v):
        x[~seen_keys] = torch.nan
    return SimpleNamespace(
        q=q, k=k, v=v, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse, expected=expected
    )


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    """Close to those in fp64, amid NaN in all memory that must not be read."""
    case = CASES[name]
    x = operands(case)
    tiles = key_tiles(case.spans, 128, case.keys, case.window)
    buffers = int(tiles[:, 5].max()) + 1
    assert buffers == (2 if name == "shared_keys" or "halves" in name else 1)
    with poisoned_memory():
        found = multi_head_backward.backward(
            *(x.grad_out, x.grad_lse, x.q, x.k, x.v, x.out, x.lse),
            *(tiles, buffers, SCALE, case.window),
        )
    bound = 8e-3 if case.dtype == torch.bfloat16 else 1e-3
    for of, exact, like in zip(found, x.expected, (x.q, x.k, x.v)):
        assert of.dtype == case.dtype and of.shape == like.shape
        error = torch.linalg.vector_norm(of.double() - exact)
        # With one key the gradients of scores are 0.
        assert error <= bound * torch.linalg.vector_norm(exact) + 1e-5 * len(exact), name
