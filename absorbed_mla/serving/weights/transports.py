"""Transports of a bucket from one process to others: a process group, or memory that they share."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor


class Transport(Protocol):
    """What brings the bytes of a buffer to the receivers."""

    def buffer(self, size: int) -> Tensor:
        """A buffer of the sender, uint8 [size]."""
        ...

    def send(self, buffer: Tensor, size: int, announce: Callable[[list[bytes]], None]) -> None:
        """Send the first ``size`` bytes of a buffer; ``announce`` gets a message for each receiver.

        The buffer must stay as it is until all receivers have answered.
        """
        ...

    def receive(self, message: bytes, size: int) -> Tensor:
        """The bytes that were announced, in memory that the next message may overwrite."""
        ...


class GroupTransport:
    """Broadcasts from rank 0 of a process group of its own: NCCL between GPUs, Gloo between CPUs.

    Args:
        store: Where the ranks meet.
        rank: Of this process; 0 sends.
        size: Of the group.
        device: Of the buffers.
        timeout: Of a broadcast.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta
    ) -> None:
        self._device, self._num_receivers = device, size - 1
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.distributed_c10d.ProcessGroupGloo(store, rank, size, timeout)
        self._received: Tensor | None = None

    def buffer(self, size: int) -> Tensor:
        """See :class:`Transport`."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def send(self, buffer: Tensor, size: int, announce: Callable[[list[bytes]], None]) -> None:
        """See :class:`Transport`."""
        announce([b""] * self._num_receivers)
        self._group.broadcast(buffer[:size], 0).wait()

    def receive(self, message: bytes, size: int) -> Tensor:
        """See :class:`Transport`."""
        if self._received is None or len(self._received) < size:
            self._received = None
            self._received = self.buffer(size)
        self._group.broadcast(self._received[:size], 0).wait()
        return self._received


class SharedMemoryTransport:
    """Memory of the sender that the receivers of its machine see: CUDA IPC, or a file in memory.

    Args:
        num_receivers: Of each buffer.
        device: Of the buffers.
    """

    def __init__(self, num_receivers: int, device: torch.device) -> None:
        self._num_receivers, self._device = num_receivers, device
        # By the address of a buffer, the message that names it to each receiver.
        self._messages: dict[int, list[bytes]] = {}
        self._files: list[int] = []
        self._opened: dict[bytes, Tensor] = {}

    def buffer(self, size: int) -> Tensor:
        """See :class:`Transport`."""
        if self._device.type == "cuda":
            made = torch.empty(size, dtype=torch.uint8, device=self._device)
            # One each: a handle counts those who have opened it.
            messages = [pickle.dumps(reduce_tensor(made)) for _ in range(self._num_receivers)]
        else:
            file = os.memfd_create("absorbed_mla_weights")
            self._files.append(file)
            os.ftruncate(file, size)
            path = f"/proc/{os.getpid()}/fd/{file}"
            made = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            messages = [pickle.dumps((_open_file, (path, size)))] * self._num_receivers
        self._messages[made.data_ptr()] = messages
        return made

    def send(self, buffer: Tensor, size: int, announce: Callable[[list[bytes]], None]) -> None:
        """See :class:`Transport`."""
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()
        announce(self._messages[buffer.data_ptr()])

    def receive(self, message: bytes, size: int) -> Tensor:
        """See :class:`Transport`."""
        if message not in self._opened:
            function, arguments = pickle.loads(message)
            self._opened[message] = function(*arguments)
        return self._opened[message]

    def close(self) -> None:
        """Close the sender's files; receivers keep what they have opened."""
        for file in self._files:
            os.close(file)
        self._files.clear()


def _open_file(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
