"""One block of latents as a safetensors file, and what makes a file be refused."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_FORMAT = "absorbed_mla prefix block 2"
_CHECKSUM = "sha256"


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
        return sum(math.prod(shape) for shape in self.shapes.values()) * self.dtype.itemsize


def write_block(
    path: Path, tensors: Mapping[str, Tensor], layout: BlockLayout, key: Mapping[str, str]
) -> None:
    """Write a file.

    Args:
        path: Where.
        tensors: Of the layout's names, shapes and dtype, on the CPU.
        layout: Of the block.
        key: What the block is of; :func:`read_block` asks for the same.
    """
    from safetensors.torch import save_file  # only where a folder is asked for

    parts = {name: tensors[name].contiguous() for name in layout.shapes}
    save_file(parts, path, {"format": _FORMAT, **key, _CHECKSUM: _checksum(parts)})


def read_block(path: Path, layout: BlockLayout, key: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a file that :func:`write_block` wrote, by name.

    Raises:
        ValueError: Saying what is wrong: no such file format, other tensors, of another key, or a
            wrong checksum.
        OSError: If it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata, names = file.metadata() or {}, file.keys()
            # Copies: what is mapped would change with the file.
            found = {name: file.get_tensor(name).clone() for name in names}
    except SafetensorError as error:
        raise ValueError(f"safetensors cannot read it: {error}") from error
    expected = {"format": _FORMAT, **key}
    if any(metadata.get(name) != value for name, value in expected.items()):
        raise ValueError(f"it is not of {expected}")
    wanted = {name: (tuple(shape), layout.dtype) for name, shape in layout.shapes.items()}
    held = {name: (tuple(x.shape), x.dtype) for name, x in found.items()}
    if held != wanted:
        raise ValueError(f"it must hold {wanted}, got {held}")
    if _checksum(found) != metadata.get(_CHECKSUM):
        raise ValueError("its checksum is wrong")
    return found


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of the tensors' bytes, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def require_files(dtype: torch.dtype) -> None:
    """Check that files can be written, and hold such latents.

    Raises:
        ValueError: If not.
    """
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "prefix_cache_dir needs the package safetensors (pip install it)"
        ) from error
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise ValueError(f"prefix_cache_dir keeps latents of 16 bits or more, got {dtype}")
