"""Files of ``torch.save``: their content without tensor values, and the place of each value.

A file is a zip archive of one pickle and one record of bytes per storage. The archive's directory
and the globals of the pickle are vetted first; ``torch.load(weights_only=True)`` then unpickles it
onto the meta device. Tensors are mapped one at a time from their records: ``torch.load(mmap=True)``
would map the whole file writable, which the kernel refuses for a file larger than memory.
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.pickles import check_globals
from checkpoint_conversion.lazy_tensor import LazyTensor

# Far more than the tensor names of any model need.
_MOST_PICKLE_BYTES = 1 << 30
# Smaller tensors are copied: each mapping holds a file descriptor while its tensor lives.
_MAPPED_FROM = 1 << 20
# The allow-list of torch.load is global to the process.
_ALLOWING = threading.Lock()
_LOCAL_HEADER = struct.Struct("<26xHH")


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


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file.

    Attributes:
        path: The file.
        offset: Offset of the first value in bytes.
        shape: Shape of the tensor.
        strides: Strides in values, as in torch.
        dtype: Dtype of the tensor.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def span(self) -> int:
        """Bytes from the first value to the end of the last."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        return (last + 1) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its values are stored in order, without gaps."""
        return self.strides == _contiguous_strides(self.shape)

    def view(self, *shape: int) -> StoredTensor:
        """The same values, which must be contiguous, in another shape."""
        assert self.is_contiguous
        assert math.prod(shape) == math.prod(self.shape)
        return StoredTensor(self.path, self.offset, shape, _contiguous_strides(shape), self.dtype)

    def lazy(self, name: str) -> LazyTensor:
        """As a lazy tensor whose leaf is ``name``; parts of it are read without the rest."""

        def part(dim: int, start: int, length: int) -> LazyTensor:
            shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
            offset = self.offset + start * self.strides[dim] * self.dtype.itemsize
            return StoredTensor(self.path, offset, shape, self.strides, self.dtype).lazy(name)

        return LazyTensor(
            self.shape, self.dtype, lambda session: self.load(), frozenset({name}), self.span, part
        )

    def load(self) -> Tensor:
        """The values; a large tensor is mapped from the file while it lives, a small one copied."""
        if not self.span:
            return torch.empty(self.shape, dtype=self.dtype)
        skipped, buffer = self._mapped() if self.span >= _MAPPED_FROM else self._copied()
        count = self.span // self.dtype.itemsize
        flat = torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=skipped)
        return flat.as_strided(self.shape, self.strides)

    def _mapped(self) -> tuple[int, mmap.mmap]:
        skipped = self.offset % mmap.ALLOCATIONGRANULARITY
        with open(self.path, "rb") as file:
            # torch wants a writable buffer; no page of this private mapping is ever written.
            buffer = mmap.mmap(
                file.fileno(),
                skipped + self.span,
                access=mmap.ACCESS_COPY,
                offset=self.offset - skipped,
            )
        buffer.madvise(mmap.MADV_SEQUENTIAL)
        return skipped, buffer

    def _copied(self) -> tuple[int, bytearray]:
        buffer = bytearray(self.span)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset)
            if file.readinto(buffer) != self.span:
                raise CheckpointError(f"{self.path} became shorter while it was read")
        return 0, buffer


@dataclass(frozen=True)
class PtFile:
    """The content of a ``torch.save`` file.

    Attributes:
        path: The file.
        content: The saved object; tensors are on the meta device, and objects of other libraries
            are stand-ins.
        records: Every record of the archive: offset -> size, in bytes.
        offset: Offset of the archive in the file, in bytes.
    """

    path: Path
    content: object
    records: Mapping[int, int]
    offset: int = 0

    def stored(self, tensor: Tensor) -> StoredTensor:
        """The place of the values of a tensor from ``content``.

        Raises:
            CheckpointError: If it is no plain tensor, or does not lie within its record.
        """
        if tensor.layout != torch.strided or tensor.device.type != "meta" or tensor.is_neg():
            raise CheckpointError(f"is no plain tensor ({tensor.layout}, {tensor.device})")
        start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        size = tensor.untyped_storage().nbytes()
        if size and (not isinstance(start, int) or self.records.get(start) != size):
            raise CheckpointError(f"refers to {size} bytes at {start}, where no record is")
        skipped = int(tensor.storage_offset()) * tensor.dtype.itemsize
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        offset = self.offset + (start or 0) + skipped
        result = StoredTensor(self.path, offset, shape, strides, tensor.dtype)
        # With a stride of 0 a tensor could claim any number of values.
        if skipped + result.span > size or tensor.numel() * tensor.dtype.itemsize > size:
            raise CheckpointError(
                f"has shape {result.shape} and strides {result.strides} from {skipped} bytes on, "
                f"in a storage of {size} bytes"
            )
        return result


def open_pt(place: Path | FileSlice) -> PtFile:
    """Read the content of a ``torch.save`` file, without the values of tensors.

    Args:
        place: The file, or the slice of a file that holds the archive.

    Raises:
        CheckpointError: If it is not in the format of ``torch.save``, is damaged, or holds objects
            that are neither tensors nor plain values.
    """
    try:
        if isinstance(place, Path):
            place = FileSlice(place, 0, place.stat().st_size)
        with place.open() as file:
            positions, pickled = _read_archive(file)
            stand_ins = check_globals(pickled)
            file.seek(0)
            with _only_allowing(stand_ins):
                content = torch.load(file, map_location="meta", weights_only=True)
    except CheckpointError as error:
        raise CheckpointError(f"{place} {error}") from None
    # zipfile and torch raise all kinds of errors for damaged files.
    except Exception as error:
        raise CheckpointError(f"{place} cannot be read: {_first_line(error)}") from error
    return PtFile(place.path, content, dict(positions.values()), place.offset)


@contextlib.contextmanager
def _only_allowing(allowed: Sequence[Callable | tuple[Callable, str]]) -> Iterator[None]:
    """Make this the whole allow-list of torch.load; Megatron, for one, adds classes to it."""
    with _ALLOWING:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(allowed))
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _read_archive(file: BinaryIO) -> tuple[dict[str, tuple[int, int]], bytes]:
    """The records, name without the archive's own -> (offset, size), and the pickle."""
    if file.read(4) != b"PK\x03\x04":
        raise CheckpointError(
            "is not in torch.save's zip format (files older than torch 1.6 are not; load and "
            "save such a file again)"
        )
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    pickle_entry = _check_entries(entries)
    records = {}
    for entry in entries:
        file.seek(entry.header_offset)
        name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        start = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        records[entry.filename.partition("/")[2]] = (start, entry.file_size)
    size = file.seek(0, 2)
    if any(start + length > size for start, length in records.values()):
        raise CheckpointError("is cut off: a record ends beyond the end of the file")
    if "byteorder" in records and _read(file, *records["byteorder"]) != b"little":
        raise CheckpointError("was saved on a big-endian machine")
    pickled = _read(file, *records["data.pkl"])
    # A checksum of zero means that it was saved without one, which zipfile does not know.
    if pickle_entry.CRC and zlib.crc32(pickled) != pickle_entry.CRC:
        raise CheckpointError("is damaged: the CRC of its pickle does not fit")
    return records, pickled


def _read(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)


def _check_entries(entries: list[zipfile.ZipInfo]) -> zipfile.ZipInfo:
    """Check that the directory is one that ``torch.save`` writes; return the pickle's entry."""
    names = [entry.filename for entry in entries]
    pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
    folders = {name.partition("/")[0] for name in names}
    if len(pickles) != 1 or len(folders) != 1 or len(set(names)) != len(names):
        raise CheckpointError("is a zip archive, but not one of torch.save")
    if any(name.endswith("/constants.pkl") for name in names):
        raise CheckpointError("is TorchScript, which holds code; a checkpoint holds tensors")
    # A compressed record could have any size; torch.save never compresses.
    if any(
        e.compress_type != zipfile.ZIP_STORED or e.file_size != e.compress_size for e in entries
    ):
        raise CheckpointError("has compressed records, which torch.save does not write")
    entry = entries[names.index(pickles[0])]
    if entry.file_size > _MOST_PICKLE_BYTES:
        raise CheckpointError(f"has a pickle of more than {_MOST_PICKLE_BYTES} bytes")
    return entry


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
