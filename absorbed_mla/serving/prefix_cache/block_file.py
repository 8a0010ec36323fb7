"""A file of the prefix cache: consecutive blocks as safetensors, checked when read.

A block has a checksum of its own, which also covers its hash and the fingerprint, so that any part
of a file can be read and checked without the rest. The header is as :func:`_header` makes it, to
the byte.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_FORMAT = "absorbed_mla prefix blocks 3"
_DTYPES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_LONGEST_HEADER = 2**24
# Memory that one system call fills.
_MOST_VIEWS = min(os.sysconf("SC_IOV_MAX"), 1024)
# Bytes of one tensor of a block, in several parts.
Views = Sequence[np.ndarray]


@dataclass(frozen=True)
class BlockLayout:
    """Tensors of one block: names, shapes and the dtype that they share.

    Attributes:
        shapes: By name.
        dtype: Of all of them.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of the tensors of a block, without the header."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor of a block."""
        return [math.prod(shape) * self.dtype.itemsize for shape in self.shapes.values()]


@dataclass(frozen=True)
class Group:
    """What the header of a file says.

    Attributes:
        hashes: Of the tokens up to the end of each block.
        checksums: Of the blocks.
        start: Where the first tensor begins, in bytes.
    """

    hashes: tuple[int, ...]
    checksums: tuple[str, ...]
    start: int


def group_name(hashes: Sequence[int]) -> str:
    """Name of the file of these blocks."""
    from xxhash import xxh3_128_hexdigest

    return xxh3_128_hexdigest(struct.pack(f"<{len(hashes)}Q", *hashes)) + ".safetensors"


def write_group(
    path: Path,
    hashes: Sequence[int],
    tensors: Mapping[str, Tensor],
    layout: BlockLayout,
    fingerprint: str,
) -> None:
    """Write a file.

    Args:
        tensors: Of the layout's names, [blocks, *shape] and dtype, on the CPU.
        fingerprint: What the latents depend on besides the tokens.
    """
    parts = [bytes_of(tensors[name].contiguous()) for name in layout.shapes]
    by_block = zip(*(part.reshape(len(hashes), -1) for part in parts))
    checksums = [
        _checksum(fingerprint, one, [[views] for views in block])
        for one, block in zip(hashes, by_block)
    ]
    with path.open("wb") as file:
        file.write(_header(hashes, checksums, layout, fingerprint))
        for part in parts:
            file.write(part)


def read_header(file: int, name: str, layout: BlockLayout, fingerprint: str) -> Group:
    """Check a file's header and size.

    Args:
        fingerprint: As it was written with.

    Raises:
        ValueError: Saying what is wrong.
        OSError: If it cannot be read.
    """
    [length] = struct.unpack("<Q", _read(file, 8, 0))
    if length > _LONGEST_HEADER:
        raise ValueError("it has no header of safetensors")
    raw = _read(file, length, 8)
    try:
        metadata = json.loads(raw)["__metadata__"]
        found = metadata["format"], metadata["fingerprint"]
        hashes = tuple(int(word, 16) for word in metadata["hashes"].split())
        checksums = tuple(metadata["checksums"].split())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header cannot be read: {error!r}") from error
    if found != (_FORMAT, fingerprint):
        raise ValueError(f"it must be of {(_FORMAT, fingerprint)}, got {found}")
    start, size = 8 + length, os.fstat(file).st_size
    if (
        len(hashes) != len(checksums)
        or max(hashes, default=0) >= 2**64
        or group_name(hashes) != name
        or _header(hashes, checksums, layout, fingerprint)[8:] != raw
        or size != start + len(hashes) * layout.num_bytes
    ):
        raise ValueError("its header is not that of its name and its blocks, or it is not whole")
    return Group(hashes, checksums, start)


def read_blocks(
    path: Path,
    hashes: Sequence[int],
    targets: Sequence[Sequence[Views]],
    layout: BlockLayout,
    fingerprint: str,
) -> int:
    """Read neighbouring blocks of a file.

    Args:
        targets: For each block the memory of each of its tensors.
        fingerprint: As it was written with.

    Returns:
        How many blocks have a right checksum, up to the first that has not.

    Raises:
        ValueError: If the file holds something else.
        OSError: If it cannot be read.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        group = read_header(file, path.name, layout, fingerprint)
        first = group.hashes.index(hashes[0])  # a ValueError where it is not there
        start = group.start
        for number, size in enumerate(layout.sizes):
            views = itertools.chain.from_iterable(block[number] for block in targets)
            _read_into(file, views, start + first * size)
            start += len(group.hashes) * size
    finally:
        os.close(file)
    for number, (one, views) in enumerate(zip(hashes, targets)):
        wanted = group.hashes[first + number : first + number + 1]
        if wanted != (one,):
            raise ValueError("its blocks are others")
        if _checksum(fingerprint, one, views) != group.checksums[first + number]:
            return number
    return len(hashes)


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _header(
    hashes: Sequence[int], checksums: Sequence[str], layout: BlockLayout, fingerprint: str
) -> bytes:
    """The bytes before the tensors."""
    ends = [0, *itertools.accumulate(len(hashes) * size for size in layout.sizes)]
    content: dict[str, object] = {
        "__metadata__": {
            "format": _FORMAT,
            "fingerprint": fingerprint,
            "hashes": " ".join(f"{one:016x}" for one in hashes),
            "checksums": " ".join(checksums),
        }
    }
    for (name, shape), offsets in zip(layout.shapes.items(), zip(ends, ends[1:])):
        content[name] = {
            "dtype": _DTYPES[layout.dtype],
            "shape": [len(hashes), *shape],
            "data_offsets": offsets,
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _checksum(fingerprint: str, hash_: int, tensors: Sequence[Views]) -> str:
    """XXH3 of a block: what it is of, and its bytes."""
    from xxhash import xxh3_128

    digest = xxh3_128(f"{fingerprint} {hash_:016x}".encode())
    for views in tensors:
        for view in views:
            digest.update(view)
    return digest.hexdigest()


def _read(file: int, count: int, offset: int) -> bytes:
    data = os.pread(file, count, offset)
    if len(data) != count:
        raise ValueError("it ends early")
    return data


def _read_into(file: int, views: Iterator[np.ndarray], offset: int) -> None:
    """Fill memory from a file."""
    while part := list(itertools.islice(views, _MOST_VIEWS)):
        size = sum(view.nbytes for view in part)
        if os.preadv(file, part, offset) != size:
            raise ValueError("it ends early")
        offset += size


def require_files(dtype: torch.dtype) -> None:
    """Check that files can be written, and hold such latents.

    Raises:
        ValueError: If not.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"prefix_cache_dir keeps latents of 16 bits or more, got {dtype}")
