"""The dense forward kernel for Hopper, emulated: products, waits, masks, and tiles by turns.

On a GPU ``test_latent_kernels.py`` runs it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from absorbed_mla.core_attention.masks.spans import Span
from tests.support import needs
from tests.support.gluon_emulation import emulated
from tests.support.hostile import Case, poisoned_memory
from tests.unit.kernels.test_latent_kernels import CASES, HOPPER, check

pytest.importorskip("triton.experimental.gluon")
pytestmark = [pytest.mark.no_cover, pytest.mark.skipif(needs.HAS_GPU, reason="a GPU runs them")]

from absorbed_mla.kernels.hopper import forward  # noqa: E402

CPU = torch.device("cpu")
# Four programs, with five tiles or more each, of one block of keys to four.
TURNS = Case(21, 200, (Span(0, 21, 0, 200, 20),), content=128, rope=32, heads=64)
EMULATED = {name: CASES[name] for name in ("width_512_fp16", "width_256", "width_128")} | {
    "several_turns": TURNS,
    "batch_and_groups": replace(TURNS, queries=5, spans=(Span(1, 5, 0, 70, 60),), batch=2),
    "all_keys": Case(5, 200, (Span(0, 5, 0, 200, None),), content=512, rope=64),
    "nobody_sees_anything": Case(3, 9, (Span(1, 3, 0, 9, -8),), content=128, rope=64, heads=32),
    # Scores grow now by less, now by more than what changes a row's reference.
    "large_scores": replace(TURNS, queries=3, spans=(Span(0, 3, 0, 200, 197),), magnitude=1.7),
    "huge_scores": replace(TURNS, queries=3, spans=(Span(0, 3, 0, 200, 197),), magnitude=15.0),
    "huge_scores_fp16": replace(
        TURNS,
        queries=3,
        spans=(Span(0, 3, 0, 200, 197),),
        magnitude=6.0,
        dtype=torch.float16,
    ),
}


def attend(case: Case, seed: int = 0) -> dict:
    """Output and LSE, amid NaN in all memory that must not be read."""
    operands, _ = case.hide(case.operands(CPU), case.gradient(CPU))
    with emulated(forward, "attend_forward", "forward_kernel", seed), poisoned_memory():
        found = HOPPER.forward(operands, case.rules)
    return {"out": found.out, "lse": found.lse}


@pytest.mark.parametrize("name", EMULATED)
def test_equals_the_reference(name):
    check(attend(EMULATED[name]), EMULATED[name])


def test_any_order():
    """Roles and copies may go on in any order: the result has the same bits."""
    expected = attend(TURNS)
    for seed in range(1, 5):
        found = attend(TURNS, seed)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
