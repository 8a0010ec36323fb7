"""Checksums of tensors: the bytes of the values, in order, whatever file they are in."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

ALGORITHM = "xxh3_128"


def tensor_checksum(tensor: Tensor) -> str:
    """XXH3 (128 bits) of a tensor's values as contiguous little-endian bytes, in hexadecimal."""
    values = tensor.detach().contiguous()
    if values.numel() == 0:
        return xxhash.xxh3_128(b"").hexdigest()
    return xxhash.xxh3_128(values.flatten().view(torch.uint8).numpy()).hexdigest()
