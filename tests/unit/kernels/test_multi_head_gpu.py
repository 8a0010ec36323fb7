"""The multi-head forward kernel on a Hopper GPU: results, long sequences, graphs, compilation."""

from __future__ import annotations

import pytest
import torch

from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.masks.tiles import query_tiles
from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.registry import ATTENTION_BACKENDS
from tests.support import needs
from tests.support.backends import determinism
from tests.support.multi_head import CASES, MultiHeadCase
from tests.support.numerics import relative_error

pytest.importorskip("triton.experimental.gluon")
pytestmark = needs.hopper

from absorbed_mla.kernels.hopper import multi_head  # noqa: E402

DEVICE = torch.device("cuda")
PACK = (Span(0, 700, 0, 700, 0), Span(700, 703, 700, 703, 0), Span(703, 2048, 703, 2048, 0))


@pytest.fixture(autouse=True)
def _settings():
    """Without the suite's deterministic mode, which the backward refuses."""
    with determinism(demanded=False):
        yield


def operands(queries: int, keys: int, heads: int) -> list[torch.Tensor]:
    torch.manual_seed(queries)
    shapes = [(queries, 1, heads, 192), (keys, 1, heads, 192), (keys, 1, heads, 128)]
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]


def attend(q, k, v, spans) -> tuple[torch.Tensor, torch.Tensor]:
    tiles = query_tiles(spans, 128, len(q)).to(DEVICE)
    return multi_head.forward(q, k, v, tiles, 192**-0.5)


@pytest.mark.parametrize("name", CASES)
def test_against_definition(name):
    CASES[name].check(multi_head.forward, DEVICE)


def test_rows_do_not_depend_on_others():
    """Whether other rows of a warp are rescaled, or none."""
    CASES["growing"].check_rows(multi_head.forward, DEVICE)


@pytest.mark.parametrize("section_bytes", [1, 2**40])
@pytest.mark.parametrize("programs", [1, 7, 2**30])
def test_every_work_is_done_once(programs, section_bytes, monkeypatch):
    monkeypatch.setattr(multi_head, "_SECTION_BYTES", section_bytes)
    monkeypatch.setattr(multi_head, "processors", lambda device: programs)
    spans = (Span(0, 300, 0, 300, 0), Span(300, 700, 300, 700, 0))
    MultiHeadCase(700, 700, spans, heads=5, batch=2).check(multi_head.forward, DEVICE)


@pytest.mark.parametrize(
    ("queries", "keys", "spans"),
    [
        (8192, 8192, (Span(0, 8192, 0, 8192, 0),)),
        (2048, 2048, PACK),
        (777, 30001, (Span(0, 777, 0, 30001, 30001 - 777),)),
    ],
    ids=["causal", "pack", "chunk"],
)
def test_equals_cudnn(queries, keys, spans):
    """Many blocks and many works of a program; the same bits in every run."""
    q, k, v = operands(queries, keys, 16)
    out, lse = attend(q, k, v, spans)
    inputs, rules = AttentionInputs.multi_head(q, k, v), ScoreRules(192**-0.5, Spans(spans))
    expected = ATTENTION_BACKENDS["cudnn"].forward(inputs, rules)
    assert relative_error(out, expected.out) < 6e-3
    torch.testing.assert_close(lse, expected.lse.float(), rtol=1e-4, atol=1e-3)
    for _ in range(5):
        again = attend(q, k, v, spans)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_a_million_tokens():
    """Elements from 2**31 on; the last 500 tokens are a sequence, the others belong to none."""
    length, heads = 2**20, 16
    short = operands(500, 500, heads)
    expected = attend(*short, (Span(0, 500, 0, 500, 0),))
    q, k, v = (x.new_empty(length, *x.shape[1:]) for x in short)
    for x, rows in zip((q, k, v), short):
        x[-500:] = rows
    first = length - 500
    out, lse = attend(q, k, v, (Span(first, length, first, length, 0),))
    assert torch.equal(out[-500:], expected[0]) and torch.equal(lse[-500:], expected[1])
    assert not out[:first].any() and (lse[:first] == -torch.inf).all()


def test_recorded_graph():
    """Replayed with other numbers; works are drawn anew."""
    backend = ATTENTION_BACKENDS["hopper_expanded"]
    q, k, v = operands(2048, 2048, 16)
    inputs, rules = AttentionInputs.multi_head(q, k, v), ScoreRules(192**-0.5, Spans(PACK))
    backend.forward(inputs, rules)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = backend.forward(inputs, rules)
    for seed in range(3):
        torch.manual_seed(seed)
        q.normal_()
        graph.replay()
        expected = backend.forward(inputs, rules)
        assert torch.equal(output.out, expected.out) and torch.equal(output.lse, expected.lse)


def test_compiled():
    """``torch.compile`` calls the operator."""
    from absorbed_mla.kernels import operators

    q, k, v = operands(300, 300, 2)
    tiles = query_tiles((Span(0, 300, 0, 300, 0),), 128, 300).to(DEVICE)

    def double(*tensors):
        out, lse, _ = operators.multi_head_attention_forward(*tensors, 0.1)
        return 2 * out, lse

    compiled = torch.compile(double, fullgraph=True)
    for actual, expected in zip(compiled(q, k, v, tiles), double(q, k, v, tiles)):
        assert torch.equal(actual, expected)


def test_on_two_streams():
    """Each call has a counter of its own."""
    q, k, v = operands(4096, 4096, 16)
    spans = (Span(0, 4096, 0, 4096, 0),)
    expected = attend(q, k, v, spans)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(attend(q, k, v, spans))
    torch.cuda.synchronize()
    for out, lse in found:
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
