"""Markers that skip a test, with the reason: what the machine or the run lacks."""

from importlib.util import find_spec

import pytest
import torch

from tests.support import world

HAS_GPU = torch.cuda.is_available()
NEEDS_GPU, NEEDS_NO_GPU = "needs a GPU", "needs a machine without a GPU"
NEEDS_HOPPER = "needs a GPU of compute capability 9.0 (Hopper)"

gpu = pytest.mark.skipif(not HAS_GPU, reason=NEEDS_GPU)
_IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not _IS_HOPPER, reason=NEEDS_HOPPER)
hopper_or_no_gpu = pytest.mark.skipif(HAS_GPU and not _IS_HOPPER, reason=NEEDS_HOPPER)
no_gpu = pytest.mark.skipif(HAS_GPU, reason=NEEDS_NO_GPU)


def gpu_with(what: str, refused: str | None = None) -> pytest.MarkDecorator:
    """Needs a GPU with a package; ``refused``: why the package cannot run on this machine's GPU."""
    reason = f"needs a GPU with {what}"
    if HAS_GPU and refused:
        reason += f": {refused}"
    return pytest.mark.skipif(not HAS_GPU or refused is not None, reason=reason)


def installed(module: str, package: str) -> pytest.MarkDecorator:
    """Needs a package that CI has, and a machine with a GPU may not have."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"needs {package}")


def processes(*counts: int) -> pytest.MarkDecorator:
    """Needs one of these numbers of processes; see the layers of scripts/run_tests.sh."""
    *others, last = map(str, counts)
    named = f"{', '.join(others)} or {last}" if others else last
    return pytest.mark.skipif(world.size() not in counts, reason=f"needs {named} processes")
