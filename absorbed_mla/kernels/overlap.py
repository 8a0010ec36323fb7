"""Beginning a kernel while the one before it ends: programmatic dependent launch.

The later kernel is launched with :func:`launch_options` and waits inside (``gdc_wait``) before it
reads or writes memory. Its launch, a microsecond or two, then passes while the first one computes.
"""

from __future__ import annotations

import functools

import torch

_CAPABILITY = (9, 0)


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels there can begin before the one before them has ended."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


def launch_options(device: torch.device) -> dict[str, bool]:
    """Options of Triton's launch of a kernel that waits inside for the one before it."""
    return {"launch_pdl": True} if overlaps(device) else {}
