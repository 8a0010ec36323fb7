"""Integers from the host that kernels read: brought to the device without waiting, and kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# What a CUDA graph reads at every replay must live as long as the graph, whose end nobody tells.
_recorded: set[Tensor] = set()


def to_device(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """``make()`` on ``device``; copying it does not wait for what the device is doing."""
    # Made while evaluating, it must serve training as well.
    with torch.inference_mode(False):
        table = make()
        if device.type != "cuda":
            return table.to(device)
        return table.pin_memory().to(device, non_blocking=True)


def in_use(table: Tensor) -> Tensor:
    """The table, kept alive for as long as the device may read it."""
    if table.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            _recorded.add(table)
        else:
            table.record_stream(torch.cuda.current_stream(table.device))
    return table
