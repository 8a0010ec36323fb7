"""Checksums of tensor values, independent of the file format.

NaN and infinite values are counted in the same pass, while the values are in the processor's cache.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

ALGORITHM = "xxh3_128"
# Number of values that are hashed and counted at a time.
_CHUNK = 1 << 20
# Dtypes without infinity: bit pattern of NaN, and the mask to compare under.
_NO_NUMBER = {torch.float8_e4m3fn: (0x7F, 0x7F), torch.float8_e8m0fnu: (0xFF, 0xFF)}


class RunningChecksum:
    """The checksum of a tensor whose values are added in consecutive parts.

    Attributes:
        nan: Number of NaN values so far.
        infinite: Number of infinite values so far.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.nan = self.infinite = 0

    def update(self, tensor: Tensor) -> None:
        """Add the next values."""
        if not tensor.numel():
            return
        for values in tensor.detach().contiguous().flatten().split(_CHUNK):
            self._hash.update(values.view(torch.uint8).numpy().data)
            self._count(values)

    def hexdigest(self) -> str:
        """Of all values so far, in hexadecimal."""
        return self._hash.hexdigest()

    def not_finite(self) -> dict[str, int]:
        """Numbers of ``nan`` and ``infinite`` values so far; empty if all are finite."""
        counts = {"nan": self.nan, "infinite": self.infinite}
        return {kind: count for kind, count in counts.items() if count}

    def _count(self, values: Tensor) -> None:
        if values.dtype in _NO_NUMBER:
            pattern, mask = _NO_NUMBER[values.dtype]
            self.nan += int((values.view(torch.uint8) & mask).eq(pattern).sum())
        elif values.is_floating_point() and not _all_finite(values):
            self.nan += int(values.isnan().sum())
            self.infinite += int(values.isinf().sum())


def _all_finite(values: Tensor) -> bool:
    """Whether all values are finite: an infinity or NaN is the largest or smallest value."""
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())


def tensor_checksum(tensor: Tensor) -> str:
    """XXH3 (128 bits) of a tensor's values as contiguous little-endian bytes, in hexadecimal."""
    running = RunningChecksum()
    running.update(tensor)
    return running.hexdigest()
