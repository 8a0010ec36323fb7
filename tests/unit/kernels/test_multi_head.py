"""The multi-head forward kernel for Hopper, emulated: products, waits, masks, what goes where.

On a GPU ``test_multi_head_gpu.py`` runs it.
"""

from __future__ import annotations

import pytest
import torch

from absorbed_mla.core_attention.backends import hopper_expanded
from absorbed_mla.core_attention.backends.reference import ReferenceBackend
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.max_logits import MaxLogits
from absorbed_mla.kernels import operators
from tests.support import needs
from tests.support.differentiable import HEADS, operands, outcome
from tests.support.fake_packages.cudnn import PlainCudnn
from tests.support.gluon_emulation import emulated
from tests.support.multi_head import CASES, MultiHeadCase
from tests.support.multi_head_backward import emulate_backward
from tests.support.spans import SPANS

pytest.importorskip("triton.experimental.gluon")
pytestmark = [pytest.mark.no_cover, pytest.mark.skipif(needs.HAS_GPU, reason="a GPU runs them")]

from absorbed_mla.kernels.hopper import multi_head  # noqa: E402

CPU = torch.device("cpu")


def run(case: MultiHeadCase, seed: int = 0) -> None:
    with emulated(multi_head, "attend_multi_head", "multi_head_kernel", seed):
        case.check(multi_head.forward, CPU)


@pytest.mark.parametrize("name", CASES)
def test_against_definition(name):
    run(CASES[name])


def test_rows_do_not_depend_on_others():
    with emulated(multi_head, "attend_multi_head", "multi_head_kernel"):
        CASES["growing"].check_rows(multi_head.forward, CPU)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_roles_and_copies(seed, monkeypatch):
    """Works of one block and of several, last blocks that keys fill and that they do not."""
    monkeypatch.setattr(multi_head, "processors", lambda device: 1)
    spans = (Span(0, 130, 0, 256, 126), Span(130, 160, 256, 300, None))
    run(MultiHeadCase(160, 300, spans, heads=1, width=96, values=64), seed)


@pytest.mark.parametrize("section_bytes", [1, 2 * 300 * 160 * 2])
@pytest.mark.parametrize("programs", [2, 5, 40])
def test_every_work_is_done_once(programs, section_bytes, monkeypatch):
    """With sections of one head, and of two of three."""
    monkeypatch.setattr(multi_head, "_SECTION_BYTES", section_bytes)
    monkeypatch.setattr(multi_head, "processors", lambda device: programs)
    run(MultiHeadCase(300, 300, (Span(0, 300, 0, 300, 0),), heads=3, width=96, values=64))


def test_scale_must_be_positive():
    q = torch.zeros(1, 1, 1, 96, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="scale must be positive"):
        multi_head.forward(q, q, q[..., :64], torch.zeros(0, 5, dtype=torch.int32), 0.0)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("spans", ["bottom_right", "zigzag", "padding", "nothing"])
def test_backend(spans, batch, monkeypatch):
    """Gradients from its output and LSE, and the largest scores, as the reference's."""
    monkeypatch.setattr(hopper_expanded, "CUDNN", PlainCudnn())
    emulate_backward(monkeypatch)
    leaves = operands(torch.bfloat16, batch, {"nope": 64, "rope": 32, "v": 64})
    wide = [x.detach().double().requires_grad_() for x in leaves]
    results, found = [], []
    for backend, tensors in ((ReferenceBackend(), wide), (hopper_expanded.ENTRY, leaves)):
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        found.append(MaxLogits(torch.full((HEADS,), -torch.inf, dtype=dtype)))
        rules = ScoreRules(0.1, Spans(SPANS[spans]), max_logits=found[-1])
        with emulated(multi_head, "attend_multi_head", "multi_head_kernel"):
            results.append(outcome(backend, tensors, rules))
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
        tiles = torch.empty(1, 5, dtype=torch.int32)
    for record in (False, True):
        out, lse, largest = operators.multi_head_attention_forward(q, q, v, tiles, 1.0, record)
        assert out.shape == (5, 2, 3, 128) and out.dtype == torch.float16
        assert lse.shape == (5, 2, 3) and lse.dtype == torch.float32
        assert largest.shape == (lse.shape if record else (0,))
    k = torch.empty(7, 2, 3, 192, dtype=torch.float16, device="meta")
    saved = out, None, out, lse, q, k, v
    grads = operators.multi_head_attention_backward(*saved, tiles, 1, 1.0)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
