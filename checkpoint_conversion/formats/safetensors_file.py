"""Tensors in safetensors files: shapes from the header, values memory-mapped when needed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_conversion.checkpoint_folder import shown_name
from checkpoint_conversion.errors import CheckpointError, raise_problems
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession

# fmt: off
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16,
    "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}
# fmt: on
# The largest size in torch; only an empty tensor could have a larger one in a file.
_LARGEST_SIZE = 2**63 - 1
# Raised by safetensors and torch for a file that was changed after its header was read.
_READ_ERRORS = (SafetensorError, OSError, RuntimeError, TypeError, ValueError)


def read_header(path: Path) -> dict[str, LazyTensor]:
    """Every tensor of a file, by name; safetensors checks that sizes and offsets fit the file.

    Raises:
        CheckpointError: If it is no safetensors file, is damaged, or has dtypes unknown to torch.
    """
    tensors, problems = {}, []
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                header = file.get_slice(name)
                shape, dtype = tuple(header.get_shape()), _DTYPES.get(header.get_dtype())
                if not name.isprintable():
                    problems.append(f"{shown_name(name)} has characters that cannot be printed")
                elif dtype is None or any(size > _LARGEST_SIZE for size in shape):
                    problems.append(f"{name} of dtype {header.get_dtype()} cannot be read by torch")
                else:
                    origin = (0,) * len(shape)
                    tensors[name] = _Region(path, name, dtype, shape, origin, shape).lazy()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    raise_problems(f"{path} holds tensors that cannot be read:", problems)
    return tensors


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> int:
    """Write a file.

    Args:
        tensors: Contiguous, none sharing memory with another.
        path: The file; an existing one is replaced.

    Returns:
        The file's size in bytes.

    Raises:
        OSError: If the file system fails.
    """
    # safetensors makes files that only their owner may read; give it the usual mode.
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:
        raise _os_error(error, path) from error
    path.chmod(mode)
    return path.stat().st_size


@dataclass(frozen=True, slots=True)
class _Region:
    """A rectangular part of a tensor in a file."""

    path: Path
    name: str
    dtype: torch.dtype
    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def lazy(self) -> LazyTensor:
        leaves = frozenset({self.name})
        return LazyTensor(self.shape, self.dtype, self.load, leaves, self._span(), self.part)

    def part(self, dim: int, start: int, length: int) -> LazyTensor:
        starts = (*self.start[:dim], self.start[dim] + start, *self.start[dim + 1 :])
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return _Region(self.path, self.name, self.dtype, self.whole, starts, shape).lazy()

    def load(self, session: ReadSession) -> Tensor:
        """The values as a view of the mapped file; only pages that are read become resident."""
        try:
            file = session.open(self.path, lambda: safe_open(self.path, framework="pt"))
            tensor = file.get_tensor(self.name)
        except _READ_ERRORS as error:
            raise CheckpointError(f"{self.name} in {self.path} cannot be read: {error}") from error
        if tuple(tensor.shape) != self.whole or tensor.dtype != self.dtype:
            raise CheckpointError(f"{self.path} was changed while it was being read")
        for dim, (start, length) in enumerate(zip(self.start, self.shape)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def _span(self) -> int:
        """Bytes from the first value to the last; the kernel may map all pages in between."""
        if 0 in self.shape:
            return 0
        values, stride = 1, 1
        for size, length in zip(reversed(self.whole), reversed(self.shape)):
            values += (length - 1) * stride
            stride *= size
        return values * self.dtype.itemsize


def _os_error(error: SafetensorError, path: Path) -> OSError:
    """The system's error behind a failed write, which safetensors gives as text only."""
    found = re.search(r"\(os error ([0-9]{1,4})\)", str(error))
    if found is None:
        return OSError(f"{path} cannot be written: {error}")
    return OSError(int(found[1]), os.strerror(int(found[1])), str(path))
