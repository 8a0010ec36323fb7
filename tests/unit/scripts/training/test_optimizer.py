"""The learning rate of scripts/train.py; its optimizer is tested in tests/distributed."""

from __future__ import annotations

import pytest

from training.optimizer import learning_rate


@pytest.mark.parametrize("style", ["constant", "cosine", "linear"])
def test_learning_rate(style):
    rates = [
        learning_rate(i, lr=1.0, min_lr=0.1, warmup=4, decay_iters=20, style=style)
        for i in range(30)
    ]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert all(a >= b for a, b in zip(rates[4:], rates[5:]))
    assert rates[-1] == (1.0 if style == "constant" else 0.1)
    if style != "constant":
        assert rates[12] == pytest.approx(0.55)
