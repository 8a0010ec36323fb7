"""Writing a file of torch.save tensor by tensor, so that it need not fit into memory.

``torch.save`` first writes the file with room for values that are not there
(``torch.serialization.skip_data``); then each tensor's bytes go to their place. The records of
values keep a CRC of zero, which ``torch.load`` does not look at.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_conversion.formats.pt_file import record_positions
from checkpoint_conversion.lazy_tensor import LazyTensor

# Bytes per write; progress is told after each tensor.
_WRITE = 64 << 20
_ALIGNMENT = 64


def reserve(
    path: Path, tensors: Mapping[str, LazyTensor], content: Callable[[dict[str, Tensor]], object]
) -> dict[str, int]:
    """Write a file that has room for its tensors' values.

    Args:
        path: The file.
        tensors: Of what shapes and dtypes they are.
        content: Makes what is saved, of tensors that have no values yet. It must use all of them,
            in order, before any other tensor.

    Returns:
        Where in the file the values of each tensor belong.
    """
    # A file of holes: its mapping has a size, but neither memory nor disk space.
    with tempfile.TemporaryFile() as nothing:
        *starts, size = itertools.accumulate(map(_padded, tensors.values()), initial=0)
        nothing.truncate(size)
        empty = mmap.mmap(nothing.fileno(), size)
        places = zip(tensors.items(), starts)
        saved = content({name: _placeholder(empty, start, t) for (name, t), start in places})
        with torch.serialization.skip_data():
            torch.save(saved, path)
    positions = record_positions(path)
    # torch.save numbers the storages as it meets them.
    result = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        result[name], size = positions[f"data/{number}"]
        assert size == tensor.nbytes, (path, name, size)
    return result


def write_values(descriptor: int, values: Tensor, offset: int) -> None:
    """Write a contiguous tensor's bytes at an offset of a file."""
    if not values.numel():
        return
    left = memoryview(values.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
    while left:
        written = os.pwrite(descriptor, left[:_WRITE], offset)
        left, offset = left[written:], offset + written


def _padded(tensor: LazyTensor) -> int:
    """Bytes of a placeholder; not none, as each has to be at a place of its own."""
    return (tensor.nbytes // _ALIGNMENT + 1) * _ALIGNMENT


def _placeholder(empty: mmap.mmap, start: int, tensor: LazyTensor) -> Tensor:
    """A tensor with a storage of its own, of the right size, at ``start`` in ``empty``."""
    count = tensor.nbytes // tensor.dtype.itemsize
    if not count:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    flat = torch.frombuffer(empty, dtype=tensor.dtype, count=count, offset=start)
    return flat.view(tensor.shape)
