"""A slice of a file that can be opened like a file."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True)
class FileSlice:
    """A range of bytes in a file.

    Attributes:
        path: The file.
        offset: Offset of the first byte.
        length: Number of bytes.
    """

    path: Path
    offset: int
    length: int

    def open(self) -> BinaryIO:
        """Open the range for reading; bytes before and after it cannot be reached."""
        return io.BufferedReader(_SliceReader(self))

    def __str__(self) -> str:
        return f"{self.path} at {self.offset}" if self.offset else str(self.path)


class _SliceReader(io.RawIOBase):
    def __init__(self, where: FileSlice) -> None:
        self._where = where
        self._position = 0
        self._file = where.path.open("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._where.length}
        self._position = max(0, base[whence] + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._where.length - self._position))
        view = memoryview(buffer)[:count]
        count = os.preadv(self._file.fileno(), [view], self._where.offset + self._position)
        self._position += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
