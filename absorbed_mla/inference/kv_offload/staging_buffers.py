"""Staging buffers of KV offload: device memory filled ahead of the attention that reads it.

A step reads the same windows of host memory in every layer, in the same order, so the copies that
follow are known: they are queued on a stream of their own while the device computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

# Buffers of a ring.
NUM_BUFFERS = 4
# First block in the buffer, first slot in host memory, and how many follow each other.
Run = tuple[int, int, int]


class Streams:
    """The order between copies to buffers and the work of the current stream.

    A buffer is copied to after :meth:`await_free` and before :meth:`copied`; it is read after
    :meth:`await_copied` and before :meth:`free`. Here on a CPU, where copies are done at once, and
    nothing has to wait.
    """

    def begin(self) -> None:
        """Let copies from now on wait for everything that is queued on the current stream."""

    def await_free(self, buffer: int) -> None:
        """Let copies from now on wait for what was queued before the buffer's last ``free``."""

    def copy(self, buffer: int, target: Tensor, source: Tensor) -> None:
        """Copy to a part of a buffer."""
        target.copy_(source)

    def copied(self, buffer: int) -> None:
        """All copies to the buffer are queued."""

    def await_copied(self, buffer: int) -> None:
        """Let the current stream from now on wait for the buffer's copies."""

    def free(self, buffer: int) -> None:
        """All work that reads the buffer is queued on the current stream."""


class StreamCopies(Streams):
    """On a GPU: a stream for copies, and for each buffer an event in either direction.

    Args:
        memory: That of all buffers; it is not given to others before the copies have ended.
    """

    def __init__(self, memory: Tensor, buffers: int) -> None:
        self._device = memory.device
        self._stream = torch.cuda.Stream(self._device)
        self._copied = [torch.cuda.Event() for _ in range(buffers)]
        self._free = [torch.cuda.Event() for _ in range(buffers)]
        memory.record_stream(self._stream)

    def begin(self) -> None:
        """See :class:`Streams`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def await_free(self, buffer: int) -> None:
        """See :class:`Streams`."""
        self._stream.wait_event(self._free[buffer])

    def copy(self, buffer: int, target: Tensor, source: Tensor) -> None:
        """See :class:`Streams`."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def copied(self, buffer: int) -> None:
        """See :class:`Streams`."""
        self._copied[buffer].record(self._stream)

    def await_copied(self, buffer: int) -> None:
        """See :class:`Streams`."""
        torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])

    def free(self, buffer: int) -> None:
        """See :class:`Streams`."""
        self._free[buffer].record(torch.cuda.current_stream(self._device))


def streams_for(memory: Tensor, buffers: int) -> Streams:
    """Of the device that the memory is on."""
    return StreamCopies(memory, buffers) if memory.is_cuda else Streams()


class StagingRing:
    """Fills buffers in turn, in the order in which the windows of a step's layers are read.

    Layers run one after the other, each over all windows as often as the layer before it. What is
    read in another order is copied when it is asked for, and the order goes on from there.

    Args:
        buffers: [buffers, blocks, block_size, C + R], neighbours in memory.
        host: The slots in host memory, [layers, slots, block_size, C + R].
    """

    def __init__(self, buffers: Tensor, host: Tensor) -> None:
        self._buffers, self._host = buffers, host
        self._streams = streams_for(buffers, len(buffers))
        self._windows: Sequence[tuple[Run, ...]] = ()
        # Layers and windows that were copied, or are being copied, and were not asked for yet.
        self._ahead: deque[tuple[tuple[int, int], int]] = deque()
        self._number = 0  # of copied windows, which are in buffers in turn
        self._taken: int | None = None  # the buffer that is being read
        self._following: tuple[int, int, int] | None = None  # layer, pass over it, window
        self._layer, self._pass, self._passes = -1, 0, 1

    def begin(self, windows: Sequence[tuple[Run, ...]]) -> None:
        """Begin a step, whose moves of blocks are queued on the current stream; copy ahead.

        Args:
            windows: What to copy for each of them; empty where nothing is in host memory.
        """
        self._windows = windows
        self._ahead.clear()
        self._taken = None
        self._layer, self._pass, self._passes = -1, 0, 1
        self._following = (0, 0, 0) if windows else None
        if windows:
            self._streams.begin()
            self._copy_ahead()

    def forget(self) -> None:
        """Blocks in host memory have changed: copy again what was copied ahead."""
        self._ahead.clear()

    def take(self, layer: int, window: int) -> int:
        """The buffer that holds a window of a layer for what is queued on the current stream next.

        Its content lasts until :meth:`free`, or until another window is taken.
        """
        self.free()
        self._count_passes(layer, window)
        wanted = layer, window
        while self._ahead and self._ahead[0][0] != wanted:
            self._ahead.popleft()
        if not self._ahead:
            self._following = layer, self._pass, window
            self._copy_next()
        _, self._taken = self._ahead.popleft()
        self._copy_ahead()
        self._streams.await_copied(self._taken)
        return self._taken

    def free(self) -> None:
        """What reads the taken window is queued on the current stream."""
        if self._taken is not None:
            self._streams.free(self._taken)
            self._taken = None
            self._copy_ahead()

    def _count_passes(self, layer: int, window: int) -> None:
        if layer != self._layer:
            if self._layer >= 0:
                self._passes = self._pass + 1
            self._layer, self._pass = layer, 0
        elif not window:
            self._pass += 1

    def _copy_ahead(self) -> None:
        """Fill all buffers that are not being read."""
        room = len(self._buffers) - (self._taken is not None)
        while self._following is not None and len(self._ahead) < room:
            self._copy_next()

    def _copy_next(self) -> None:
        """Copy the window that is read after those copied before."""
        assert self._following is not None
        layer, _, window = self._following
        buffer = self._number % len(self._buffers)
        self._number += 1
        self._streams.await_free(buffer)
        for place, slot, count in self._windows[window]:
            target = self._buffers[buffer, place : place + count]
            self._streams.copy(buffer, target, self._host[layer, slot : slot + count])
        self._streams.copied(buffer)
        self._ahead.append(((layer, window), buffer))
        self._following = self._after(*self._following)

    def _after(self, layer: int, number: int, window: int) -> tuple[int, int, int] | None:
        """The window that follows one in a pass over a layer; None after the last layer."""
        if window + 1 < len(self._windows):
            return layer, number, window + 1
        if number + 1 < self._passes:
            return layer, number + 1, 0
        return (layer + 1, 0, 0) if layer + 1 < len(self._host) else None
