"""Weights are read side by side, in bounded memory; an error of one is raised."""

import threading

import pytest
import torch
from torch import nn

from absorbed_mla.serving.weights import live_weights
from checkpoint_conversion.lazy_tensor import LazyTensor

PEAKS = [3, 1, 1, 12, 4, 5, 2]


def test_memory(monkeypatch):
    """At most what is allowed, or one larger tensor; some are read at the same time."""
    lock, reading, sums = threading.Lock(), [0], []
    together = threading.Barrier(3)

    def share(number: int, peak: int) -> LazyTensor:
        def load(session):
            with lock:
                reading[0] += peak
                sums.append(reading[0])
            if number < 3:
                together.wait(timeout=60)
            with lock:
                reading[0] -= peak
            return torch.full((2,), float(number))

        return LazyTensor((2,), torch.float32, load, frozenset(), peak)

    pairs = [(nn.Parameter(torch.zeros(2)), share(*pair)) for pair in enumerate(PEAKS)]
    monkeypatch.setattr(live_weights, "shares", lambda *model: pairs)
    monkeypatch.setattr(live_weights, "_MOST_BYTES", 10)
    live_weights.set_weights(None, None, {})
    assert [weight.tolist() for weight, _ in pairs] == [[float(n)] * 2 for n in range(len(pairs))]
    assert max(sums) == 12 and sorted(sums)[-2] <= 10


def test_error(monkeypatch):
    def load(session):
        raise OSError("a disk ended")

    pair = nn.Parameter(torch.zeros(2)), LazyTensor((2,), torch.float32, load, frozenset(), 1)
    monkeypatch.setattr(live_weights, "shares", lambda *model: [pair])
    with pytest.raises(OSError, match="a disk ended"):
        live_weights.set_weights(None, None, {})
