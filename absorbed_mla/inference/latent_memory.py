"""Memory of a static batch's latents: all on the device, or later positions in CPU memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import BatchPart, CachePart


class LatentMemory:
    """[latent | k_rope] of every request of a batch by position; later ones may be in host memory.

    Attention reads every key, whichever are on the device. Those in host memory are copied to two
    buffers in turn: one is filled while the device attends to the other.

    Args:
        resident: Positions on the device, [positions, batch, C + R].
        host: The positions after those, in pinned memory where the device is a GPU; may be none.
        chunk: Positions copied at a time.

    Attributes:
        block_size: Positions in a block of the first part; a request is one block.
        windowed: Whether there may be several parts.
    """

    def __init__(self, resident: Tensor, host: Tensor, chunk: int) -> None:
        self.resident, self.host, self.chunk = resident, host, chunk
        self.block_size, self.windowed = len(resident), len(host) > 0

    def write(self, first: int, requests: slice, kv: Tensor) -> None:
        """Store ``kv`` [S, B, C + R] at positions from ``first`` on."""
        room = max(0, min(len(kv), self.block_size - first))
        self.resident[first : first + room, requests] = kv[:room]
        if room == len(kv):
            return
        start = max(0, first - self.block_size)
        # On the current stream, which the copies back to the device wait for.
        target = self.host[start : start + len(kv) - room, requests]
        target.copy_(kv[room:], non_blocking=self.host.is_pinned())

    def parts(self, rows: Rows, requests: slice, end: int) -> Iterator[CachePart]:
        """The keys below position ``end``. The memory of a part is reused for the next one."""
        cache = self.resident[:, requests].transpose(0, 1)
        yield BatchPart(cache, rows, end=self.block_size if self.windowed else None)
        if end > self.block_size:
            for start, copy in self._streamed(end - self.block_size):
                start += self.block_size
                cache = copy[:, requests].transpose(0, 1)
                yield BatchPart(cache, rows, start, start + len(copy))

    def _streamed(self, count: int) -> Iterator[tuple[int, Tensor]]:
        """The first ``count`` positions in host memory: starts of chunks, and their copies."""
        device = self.resident.device
        shape = (min(self.chunk, count), *self.host.shape[1:])
        buffers = [torch.empty(shape, dtype=self.host.dtype, device=device) for _ in range(2)]
        copies = Copies(device)
        starts = range(0, count, self.chunk)

        def begin(index: int) -> Tensor:
            source = self.host[starts[index] : min(starts[index] + self.chunk, count)]
            target = buffers[index % 2][: len(source)]
            copies.begin(target, source)
            return target

        pending = begin(0)
        for index, start in enumerate(starts):
            ready = pending
            copies.wait()
            if index + 1 < len(starts):
                # Kernels on the current stream may still read this buffer; the copy waits for them.
                pending = begin(index + 1)
            yield start, ready


class Copies:
    """Copies to the device on a stream of their own; plain copies on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, target: Tensor, source: Tensor) -> None:
        """Start to copy after everything that is queued on the current stream."""
        if self.stream is None:
            target.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream(target.device))
        target.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Let what is queued on the current stream from now on wait for the copies."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
