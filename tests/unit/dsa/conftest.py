"""Where the tests' tensors are."""

from __future__ import annotations

import pytest
import torch

from tests.support import world


@pytest.fixture
def _on_the_device():
    """Tensors that a test makes are on this process's device."""
    with torch.device(world.device()):
        yield
