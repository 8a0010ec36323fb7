"""The dense kernels over the latent for Hopper, emulated: products, waits, masks, what goes where.

On a GPU ``test_latent_kernels.py`` runs them. What the emulation cannot run is the instruction that
adds four numbers to memory; the order in which they lie there is that of ``in_order``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from absorbed_mla.core_attention.backends import hopper as hopper_backend
from absorbed_mla.core_attention.masks import parts
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.types import AttentionOutput
from tests.support import needs
from tests.support.backends import determinism
from tests.support.combinations import grid
from tests.support.gluon_emulation import Emulation, emulated
from tests.support.hostile import Case, named, poisoned_memory
from tests.unit.kernels.test_latent_kernels import CASES, HOPPER, check, expected

pytest.importorskip("triton.experimental.gluon")
pytestmark = [pytest.mark.no_cover, pytest.mark.skipif(needs.HAS_GPU, reason="a GPU runs them")]

from absorbed_mla.kernels.hopper import backward, forward, stored_backward  # noqa: E402

CPU, FP16 = torch.device("cpu"), torch.float16
COMMON = {name: CASES[name] for name in ("width_512_fp16", "width_256", "width_128")}
COMMON["nobody_sees_anything"] = Case(3, 9, (Span(1, 3, 0, 9, -8),), content=128, rope=64, heads=32)
# Four programs, with five tiles or more each, of one block of keys to four.
TURNS = Case(21, 200, (Span(0, 21, 0, 200, 20),), content=128, rope=32, heads=64)
GROWING = replace(TURNS, queries=3, spans=(Span(0, 3, 0, 200, 197),))
FORWARD = COMMON | {
    "several_turns": TURNS,
    "batch_and_groups": replace(TURNS, queries=5, spans=(Span(1, 5, 0, 70, 60),), batch=2),
    "all_keys": Case(5, 200, (Span(0, 5, 0, 200, None),), content=512, rope=64),
    # Scores grow now by less, now by more than what changes a row's reference.
    "large_scores": replace(GROWING, magnitude=1.7),
    "huge_scores": replace(GROWING, magnitude=15.0),
    "huge_scores_fp16": replace(GROWING, magnitude=6.0, dtype=FP16),
}
BACKWARD = COMMON | {
    "three_blocks": Case(5, 150, (Span(0, 5, 3, 150, 142),), content=256, rope=32, heads=16),
    "two_sequences": Case(
        12, 140, (Span(0, 5, 0, 66, 61), Span(7, 12, 70, 140, 65)), content=128, rope=64, heads=64
    ),
    "five_heads": Case(
        70, 600, (Span(1, 68, 0, 590, 524),), content=128, rope=32, heads=5, dtype=FP16
    ),
    "all_keys": Case(
        9, 270, (Span(0, 9, 7, 270, None),), content=256, rope=64, heads=16, lse_gradient=False
    ),
    "narrow_rope": Case(
        3, 200, (Span(0, 3, 0, 200, 197),), content=512, rope=32, heads=64, batch=2
    ),
}


def attend(case: Case, seed: int = 0) -> dict:
    """Output and LSE, amid NaN in all memory that must not be read."""
    operands, _ = case.hide(case.operands(CPU), case.gradient(CPU))
    with emulated(forward, "attend_forward", "forward_kernel", seed), poisoned_memory():
        found = HOPPER.forward(operands, case.rules)
    return {"out": found.out, "lse": found.lse}


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name):
    check(attend(FORWARD[name]), FORWARD[name])


def test_forward_in_any_order():
    """Roles and copies may go on in any order: the result has the same bits."""
    expected = attend(TURNS)
    for seed in range(1, 5):
        found = attend(TURNS, seed)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def add_fragments(part, target):
    """``reduce_fragments`` in PyTorch: in memory are groups of 8 columns, then warps, .."""
    # warp, half of its rows, row, group, pair, column
    numbers = part.view(4, 2, 8, -1, 4, 2).permute(3, 0, 2, 4, 1, 5).flatten()
    (target + torch.arange(len(numbers))).add(numbers, torch.tensor(True))


@pytest.fixture
def emulated_backward(monkeypatch):
    """The launchers' kernels run in PyTorch."""
    adding = Emulation().load("backward_kernel").attend_backward
    fragments = vars(adding.function.__globals__["Fragments"])["add"]
    monkeypatch.setitem(fragments.function.__globals__, "reduce_fragments", add_fragments)
    monkeypatch.setattr(backward, "attend_backward", adding)
    storing = Emulation().load("stored_backward_kernel").attend_backward_stored
    monkeypatch.setattr(stored_backward, "attend_backward_stored", storing)


def gradients(case: Case) -> dict:
    """From the reference's output; amid NaN in all memory that must not be read."""
    exact, _ = expected(case)
    operands, grad = case.hide(case.operands(CPU), case.gradient(CPU))
    attended = AttentionOutput(exact["out"].to(case.dtype), exact["lse"].float())
    # Tables are kept with the spans.
    rules = replace(case.rules, spans=Spans(tuple(case.spans)))
    with poisoned_memory():
        return named(attended, HOPPER.backward(grad, attended, operands, rules))


@pytest.mark.parametrize("name", BACKWARD)
def test_adding(emulated_backward, name):
    with determinism(demanded=False):
        check(gradients(BACKWARD[name]), BACKWARD[name])


@grid(1, {"name": [*BACKWARD], "tokens": [1, None]})
def test_storing(emulated_backward, name, tokens, monkeypatch):
    """P and dS of all tokens at once, or of as few as may be."""
    if tokens:
        monkeypatch.setattr(parts, "MOST_BYTES", 1)
    with determinism(demanded=True):
        check(gradients(BACKWARD[name]), BACKWARD[name])


@pytest.mark.parametrize("least", [5 * 600 * 70, 1])
def test_long_spans_are_stored(emulated_backward, least, monkeypatch):
    """Where nobody demands equal bits, it depends on the pairs of queries and keys."""
    used = []
    monkeypatch.setattr(hopper_backend, "LEAST_STORED_PAIRS", least)
    for launcher, name in ((backward, "backward"), (stored_backward, "backward_stored")):
        original = getattr(launcher, name)
        monkeypatch.setattr(
            launcher, name, lambda *args, f=original, n=name: used.append(n) or f(*args)
        )
    with determinism(demanded=False):
        gradients(BACKWARD["five_heads"])
    assert used == ["backward_stored" if least == 1 else "backward"]
