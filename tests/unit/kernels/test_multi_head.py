"""The multi-head forward kernel for Hopper, emulated: products, waits, masks, what goes where.

On a GPU ``test_multi_head_gpu.py`` runs it.
"""

from __future__ import annotations

import pytest
import torch

from absorbed_mla.core_attention.masks.spans import Span
from tests.support import needs
from tests.support.gluon_emulation import emulated
from tests.support.multi_head import CASES, MultiHeadCase

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


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_roles_and_copies(seed, turns, monkeypatch):
    """Works of one block and of several, last blocks that keys fill and that they do not."""
    monkeypatch.setattr(multi_head, "_TURNS", turns)
    monkeypatch.setattr(multi_head, "_processors", lambda device: 1)
    spans = (Span(0, 130, 0, 256, 126), Span(130, 160, 256, 300, None))
    run(MultiHeadCase(160, 300, spans, heads=1, width=96, values=64), seed)


@pytest.mark.parametrize("section_bytes", [1, 2 * 300 * 160 * 2])
@pytest.mark.parametrize("programs", [2, 5, 40])
def test_every_work_is_done_once(programs, section_bytes, monkeypatch):
    """With sections of one head, and of two of three."""
    monkeypatch.setattr(multi_head, "_SECTION_BYTES", section_bytes)
    monkeypatch.setattr(multi_head, "_processors", lambda device: programs)
    run(MultiHeadCase(300, 300, (Span(0, 300, 0, 300, 0),), heads=3, width=96, values=64))


def test_scale_must_be_positive():
    q = torch.zeros(1, 1, 1, 96, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="scale must be positive"):
        multi_head.forward(q, q, q[..., :64], torch.zeros(0, 5, dtype=torch.int32), 0.0)
