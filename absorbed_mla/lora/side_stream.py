"""A second CUDA stream, whose kernels run beside those of the current one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


class SideStream:
    """Small products beside large ones, in CUDA graphs too; on a CPU nothing is beside anything.

    Results are in the stream's own memory. Later work that gets it again waits for their readers,
    as for all that the current stream has queued.

    Args:
        device: Of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        # Else its few blocks would wait for all blocks of the large product.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def start(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Queue work behind what is queued on the current stream.

        Args:
            work: What it reads must stay referenced, and as it is, until the result is asked for.

        Returns:
            Gives its result, for which the current stream waits.
        """
        stream = self._stream
        if stream is None:
            return work
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            result = work()

        def wait() -> Result:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
            return result

        return wait
