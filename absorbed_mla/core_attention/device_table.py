"""Integer tables that the CPU makes and kernels read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Tables that a CUDA graph has recorded. A graph reads them at every replay and gives no destroy
# callback, so they are kept for the life of the process: one entry for each table ever captured.
_recorded: set[Tensor] = set()


def to_device(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """``make()`` on ``device``, copied without waiting for the work queued there."""
    # A table made under inference mode must serve training as well.
    with torch.inference_mode(False):
        table = make()
        if device.type != "cuda":
            return table.to(device)
        return table.pin_memory().to(device, non_blocking=True)


def in_use(table: Tensor) -> Tensor:
    """The table, kept alive until kernels queued on the current stream have read it."""
    if table.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            _recorded.add(table)
        else:
            table.record_stream(torch.cuda.current_stream(table.device))
    return table
