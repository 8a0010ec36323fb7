"""The multi-head forward kernel for Hopper: products, waits, masks, what goes where.

Without a GPU it is emulated.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from absorbed_mla.core_attention.backends import hopper_expanded
from absorbed_mla.core_attention.backends.reference import ReferenceBackend
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans, self_attention_spans
from absorbed_mla.core_attention.masks.tiles import query_tiles
from absorbed_mla.core_attention.max_logits import MaxLogits
from absorbed_mla.core_attention.shared_prefix import SharedPrefixBackend
from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.core_attention.window import WindowedBackend
from absorbed_mla.kernels import operators
from absorbed_mla.prefix_tree import PrefixTree
from absorbed_mla.registry import ATTENTION_BACKENDS
from absorbed_mla.sequences import SequenceLayout
from tests.support import needs, world
from tests.support.backends import determinism
from tests.support.combinations import grid
from tests.support.differentiable import HEADS, operands, outcome
from tests.support.fake_packages.cudnn import PlainCudnn
from tests.support.gluon_emulation import emulated
from tests.support.gpu_calls import capture, on_streams
from tests.support.multi_head import CASES, MultiHeadCase
from tests.support.multi_head_backward import emulate_backward
from tests.support.numerics import relative_error
from tests.support.spans import SPANS

pytest.importorskip("triton.experimental.gluon")
pytestmark = [pytest.mark.no_cover, needs.hopper_or_no_gpu]

from absorbed_mla.kernels.hopper import multi_head  # noqa: E402

DEVICE = world.device()


def running(seed: int = 0):
    """Within, the kernel runs: on the GPU, or in PyTorch."""
    if needs.HAS_GPU:
        return contextlib.nullcontext()
    return emulated(multi_head, "attend_multi_head", "multi_head_kernel", seed)


def run(case: MultiHeadCase, seed: int = 0) -> None:
    with running(seed):
        case.check(multi_head.forward, DEVICE)


@pytest.mark.parametrize("name", CASES)
def test_against_definition(name):
    run(CASES[name])


def test_rows_do_not_depend_on_others():
    """Whether other rows of a warp are rescaled, or none."""
    with running():
        CASES["growing"].check_rows(multi_head.forward, DEVICE)


@needs.no_gpu
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_roles_and_copies(seed, monkeypatch):
    """Works of one block and of several, last blocks that keys fill and that they do not."""
    monkeypatch.setattr(multi_head, "processors", lambda device: 1)
    spans = (Span(0, 130, 0, 256, 126), Span(130, 160, 256, 300, None))
    run(MultiHeadCase(160, 300, spans, heads=1, width=96, values=64), seed)


@grid(1, {"section_bytes": [1, 2 * 300 * 160 * 2, 2**40], "programs": [2, 2**30]})
def test_every_work_is_done_once(programs, section_bytes, monkeypatch):
    """With sections of one head, of two of three, of all; programs with several works, or one."""
    monkeypatch.setattr(multi_head, "_SECTION_BYTES", section_bytes)
    monkeypatch.setattr(multi_head, "processors", lambda device: programs)
    run(MultiHeadCase(300, 300, (Span(0, 300, 0, 300, 0),), heads=3, width=96, values=64))


def test_scale_must_be_positive():
    q = torch.zeros(1, 1, 1, 96, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="scale must be positive"):
        multi_head.forward(q, q, q[..., :64], torch.zeros(0, 5, dtype=torch.int32), 0.0)


def _spans(name: str) -> Spans:
    if "tree" not in name:
        return Spans(SPANS[name])
    padded = (10, 5, 3, 6) if "padded" in name else None
    tree = PrefixTree((9, 5, 3, 6), (None, 0, 1, 0), padded_lengths=padded)
    layout = SequenceLayout.from_host(tree.packed_seq_params(), tree.num_tokens)
    return self_attention_spans(layout, causal=True)


@needs.no_gpu
@pytest.mark.parametrize(
    ("spans", "batch", "window"),
    [
        *(("bottom_right", 2, None), ("zigzag", 1, None), ("padding", 2, None)),
        *(("nothing", 1, None), ("tree", 1, None), ("padded_tree", 1, None)),
        # The last two hold all keys, and hopper_expanded takes cuDNN's backward of one block.
        *(("bottom_right_pack", 1, 4), ("padding", 2, 9), ("causal", 1, 24)),
    ],
)
def test_backend(spans, batch, window, monkeypatch):
    """Gradients from its output and LSE, and the largest scores, as the reference's."""
    monkeypatch.setattr(hopper_expanded, "CUDNN", PlainCudnn())
    emulate_backward(monkeypatch)
    leaves = operands(torch.bfloat16, batch, {"nope": 64, "rope": 32, "v": 64})
    wide = [x.detach().double().requires_grad_() for x in leaves]
    results, found = [], []
    for backend, tensors in ((ReferenceBackend(), wide), (hopper_expanded.ENTRY, leaves)):
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        found.append(MaxLogits(torch.full((HEADS,), -torch.inf, dtype=dtype)))
        rules = ScoreRules(0.1, _spans(spans), max_logits=found[-1])
        with running():
            wrapped = WindowedBackend(backend, window) if window else SharedPrefixBackend(backend)
            results.append(outcome(wrapped, tensors, rules))
    for name, expected in results[0].items():
        torch.testing.assert_close(
            results[1][name].double(), expected, rtol=0.02, atol=0.02, msg=name
        )
    expected, actual = (each.of_heads.double() for each in found)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_shapes_without_data():
    """What ``torch.compile`` sees."""
    with torch.device("meta"):
        q, v = torch.empty(5, 2, 3, 192, dtype=torch.float16), torch.empty(7, 2, 3, 128)
        k = torch.empty(7, 2, 3, 192, dtype=torch.float16)
        tiles = torch.empty(1, 5, dtype=torch.int32)
    for record in (False, True):
        given = q, q, v, tiles, 1.0, record, 7 if record else None
        out, lse, largest = operators.multi_head_attention_forward(*given)
        assert out.shape == (5, 2, 3, 128) and out.dtype == torch.float16
        assert lse.shape == (5, 2, 3) and lse.dtype == torch.float32
        assert largest.shape == (lse.shape if record else (0,))
    given = out, None, out, lse, q, k, v, tiles, 1, 1.0, 7
    for sink, shape in ((None, (0,)), (lse[0, 0], (3,))):
        grads = operators.multi_head_attention_backward(*given, sink)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape, shape]


PACK = (Span(0, 700, 0, 700, 0), Span(700, 703, 700, 703, 0), Span(703, 2048, 703, 2048, 0))


def large(queries: int, keys: int, heads: int) -> list[torch.Tensor]:
    torch.manual_seed(queries)
    shapes = [(queries, 1, heads, 192), (keys, 1, heads, 192), (keys, 1, heads, 128)]
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]


def attend(q, k, v, spans) -> tuple[torch.Tensor, torch.Tensor]:
    tiles = query_tiles(spans, 128, len(q)).to(DEVICE)
    return multi_head.forward(q, k, v, tiles, 192**-0.5)


@needs.hopper
class TestOnAGpu:
    """Long sequences, graphs, compilation."""

    @pytest.fixture(autouse=True)
    def _settings(self):
        """Without the suite's deterministic mode, which the backward refuses."""
        with determinism(demanded=False):
            yield

    @pytest.mark.parametrize(
        ("queries", "keys", "spans"),
        [
            (8192, 8192, (Span(0, 8192, 0, 8192, 0),)),
            (2048, 2048, PACK),
            (777, 30001, (Span(0, 777, 0, 30001, 30001 - 777),)),
        ],
        ids=["causal", "pack", "chunk"],
    )
    def test_equals_cudnn(self, queries, keys, spans):
        """Many blocks and many works of a program; the same bits in every run."""
        q, k, v = large(queries, keys, 16)
        out, lse = attend(q, k, v, spans)
        inputs, rules = AttentionInputs.multi_head(q, k, v), ScoreRules(192**-0.5, Spans(spans))
        expected = ATTENTION_BACKENDS["cudnn"].forward(inputs, rules)
        assert relative_error(out, expected.out) < 6e-3
        torch.testing.assert_close(lse, expected.lse.float(), rtol=1e-4, atol=1e-3)
        for _ in range(5):
            assert all(map(torch.equal, attend(q, k, v, spans), (out, lse)))

    def test_a_million_tokens(self):
        """Elements from 2**31 on; the last 500 tokens are a sequence, the others belong to none."""
        length = 2**20
        short = large(500, 500, 16)
        expected = attend(*short, (Span(0, 500, 0, 500, 0),))
        q, k, v = (x.new_empty(length, *x.shape[1:]) for x in short)
        for x, rows in zip((q, k, v), short):
            x[-500:] = rows
        first = length - 500
        out, lse = attend(q, k, v, (Span(first, length, first, length, 0),))
        assert torch.equal(out[-500:], expected[0]) and torch.equal(lse[-500:], expected[1])
        assert not out[:first].any() and (lse[:first] == -torch.inf).all()

    def test_recorded_graph(self):
        """Replayed with other numbers; works are drawn anew."""
        backend = ATTENTION_BACKENDS["hopper_expanded"]
        q, k, v = large(2048, 2048, 16)
        inputs, rules = AttentionInputs.multi_head(q, k, v), ScoreRules(192**-0.5, Spans(PACK))
        graph, output = capture(lambda: backend.forward(inputs, rules))
        for seed in range(3):
            torch.manual_seed(seed)
            q.normal_()
            graph.replay()
            assert all(map(torch.equal, output, backend.forward(inputs, rules)))

    def test_compiled(self):
        """``torch.compile`` calls the operator."""
        q, k, v = large(300, 300, 2)
        tiles = query_tiles((Span(0, 300, 0, 300, 0),), 128, 300).to(DEVICE)

        def double(*tensors):
            out, lse, _ = operators.multi_head_attention_forward(*tensors, 0.1)
            return 2 * out, lse

        compiled = torch.compile(double, fullgraph=True)
        assert all(map(torch.equal, compiled(q, k, v, tiles), double(q, k, v, tiles)))

    def test_on_two_streams(self):
        """Each call has a counter of its own."""
        call = (*large(4096, 4096, 16), (Span(0, 4096, 0, 4096, 0),))
        expected = attend(*call)
        for found in on_streams(attend, [call, call]):
            assert all(map(torch.equal, found, expected))
