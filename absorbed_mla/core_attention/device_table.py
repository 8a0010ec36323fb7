"""Tables of integers that kernels read: copied to the device without waiting, and kept alive."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Tables that captured CUDA graphs read at every replay. Kept forever, because a graph gives no
# callback when it is destroyed.
_recorded: set[Tensor] = set()


def to_device(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """``make()`` on ``device``; the copy does not wait for work that is queued there."""
    # A table made in inference mode must serve training as well.
    with torch.inference_mode(False):
        table = make()
        if device.type != "cuda":
            return table.to(device)
        return table.pin_memory().to(device, non_blocking=True)


def in_use(table: Tensor) -> Tensor:
    """Return ``table``; its memory is not reused before the current stream has read it."""
    if table.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            _recorded.add(table)
        else:
            table.record_stream(torch.cuda.current_stream(table.device))
    return table
