"""A second CUDA stream, whose kernels run beside those of the current one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


class SideStream:
    """Small products beside large ones, in CUDA graphs too; on a CPU nothing is beside anything.

    Results are allocated on the side stream, without ``record_stream``: their memory is used again
    by later work of :meth:`start` only, which waits for the current stream, so for their readers.
    They must be read on the stream that is current at the next :meth:`start`.

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
