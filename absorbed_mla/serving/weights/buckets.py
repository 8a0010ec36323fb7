"""Buckets: tensors of different dtypes, one behind the other in one buffer of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from absorbed_mla.serving.weights.update import Shapes

# Where a tensor begins is a multiple of this many bytes, which views of every dtype need.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a bucket.

    Attributes:
        name, dtype, shape: Of the tensor.
        start: Its first byte.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        """The byte behind its last one."""
        return self.start + torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor, whose memory is the buffer's."""
        return buffer[self.start : self.end].view(self.dtype).view(self.shape)


Bucket = Sequence[Slot]


def buckets_of(shapes: Shapes, size: int) -> list[Bucket]:
    """Tensors in their order, as many together as fit ``size`` bytes; a larger one is alone."""
    found: list[list[Slot]] = []
    for name, dtype, shape in shapes:
        end = -(-found[-1][-1].end // _ALIGNMENT) * _ALIGNMENT if found else 0
        slot = Slot(name, dtype, tuple(shape), end)
        if not found or slot.end > size:
            slot = Slot(name, dtype, tuple(shape), 0)
            found.append([])
        found[-1].append(slot)
    return list(found)


def num_bytes(buckets: Sequence[Bucket]) -> int:
    """Bytes of a buffer in which each of them fits."""
    return max((bucket[-1].end for bucket in buckets), default=0)


def fill(buffer: Tensor, bucket: Bucket, pairs: Iterator[tuple[str, Tensor]]) -> None:
    """Copy the next tensors into their slots.

    Raises:
        RuntimeError: If other tensors come.
    """
    for slot in bucket:
        name, tensor = next(pairs, ("no tensor", torch.empty(0)))
        if (name, tensor.dtype, tuple(tensor.shape)) != (slot.name, slot.dtype, slot.shape):
            raise RuntimeError(
                f"{slot.name}, {slot.dtype} {slot.shape}, was announced, and {name}, "
                f"{tensor.dtype} {tuple(tensor.shape)}, has come"
            )
        slot.of(buffer).copy_(tensor)


def require_end(pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Go on to the end, where other ranks wait for it.

    Raises:
        RuntimeError: If more tensors come than were announced.
    """
    if more := [name for name, _ in pairs]:
        raise RuntimeError(f"{more[0]} has come, which was not announced")
