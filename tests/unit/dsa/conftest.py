"""Where the tests' tensors are."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)

from tests.support import world


@pytest.fixture
def _on_the_device():
    """Tensors that a test makes are on this process's device."""
    with torch.device(world.device()):
        yield


@pytest.fixture(autouse=True)
def _own_losses(monkeypatch):
    """Megatron keeps the losses of layers, and their scale, in class attributes."""
    monkeypatch.setattr(DSAIndexerLossAutoScaler, "main_loss_backward_scale", None)
    monkeypatch.setattr(DSAIndexerLossLoggingHelper, "tracker", {})
