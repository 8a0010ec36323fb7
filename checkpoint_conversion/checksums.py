"""Checksums of tensors: the bytes of the values, in order, whatever file they are in."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

ALGORITHM = "xxh3_128"


class RunningChecksum:
    """The checksum of a tensor whose values come one part after the other, in order."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, tensor: Tensor) -> None:
        """Add the next values."""
        values = tensor.detach().contiguous()
        if values.numel():
            self._hash.update(values.flatten().view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        """Of all values so far, in hexadecimal."""
        return self._hash.hexdigest()


def tensor_checksum(tensor: Tensor) -> str:
    """XXH3 (128 bits) of a tensor's values as contiguous little-endian bytes, in hexadecimal."""
    running = RunningChecksum()
    running.update(tensor)
    return running.hexdigest()
