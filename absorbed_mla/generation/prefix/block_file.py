"""One block of latents as a safetensors file: its bytes, and what makes a file be refused."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_FORMAT = "absorbed_mla prefix block 1"
# safetensors' names of dtypes.
_DTYPES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


@dataclass(frozen=True)
class BlockLayout:
    """Tensors of one block: names, shapes and the dtype that they share.

    Attributes:
        shapes: By name, in the order of the file.
        dtype: Of all of them.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of the tensors of a block, without the header."""
        return sum(math.prod(shape) for shape in self.shapes.values()) * self.dtype.itemsize

    def header(self) -> dict[str, object]:
        """What a file's header says of the tensors."""
        entries: dict[str, object] = {}
        first = 0
        for name, shape in self.shapes.items():
            end = first + math.prod(shape) * self.dtype.itemsize
            entries[name] = {
                "dtype": _DTYPES[self.dtype],
                "shape": list(shape),
                "data_offsets": [first, end],
            }
            first = end
        return entries


def to_bytes(tensors: Mapping[str, Tensor], layout: BlockLayout, key: Mapping[str, str]) -> bytes:
    """A safetensors file.

    Args:
        tensors: Of the layout's names, shapes and dtype, on the CPU.
        layout: Of the block.
        key: What the block is of; :func:`from_bytes` asks for the same.
    """
    payload = b"".join(
        tensors[name].contiguous().view(torch.uint8).numpy().tobytes() for name in layout.shapes
    )
    metadata = {"format": _FORMAT, **key, "sha256": hashlib.sha256(payload).hexdigest()}
    header = json.dumps({"__metadata__": metadata, **layout.header()}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + payload


def from_bytes(data: bytearray, layout: BlockLayout, key: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a file that :func:`to_bytes` wrote, by name; they are views of ``data``.

    Raises:
        ValueError: Saying what is wrong: other tensors, of another key, or a wrong checksum.
    """
    header, payload = _parts(data)
    metadata = header.pop("__metadata__", {})
    expected = {"format": _FORMAT, **key}
    if not isinstance(metadata, dict) or any(metadata.get(k) != v for k, v in expected.items()):
        raise ValueError(f"it is not of {expected}")
    if header != layout.header() or len(payload) != layout.num_bytes:
        raise ValueError(f"it must hold {layout.header()}, got {header} in {len(payload)} bytes")
    if hashlib.sha256(payload).hexdigest() != metadata.get("sha256"):
        raise ValueError("its checksum is wrong")
    tensors, first = {}, 0
    for name, shape in layout.shapes.items():
        count = math.prod(shape)
        flat = torch.frombuffer(payload, dtype=layout.dtype, count=count, offset=first)
        tensors[name] = flat.view(shape)
        first += count * layout.dtype.itemsize
    return tensors


def _parts(data: bytearray) -> tuple[dict, memoryview]:
    """Header and payload."""
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(bytes(data[8:end]))
    except ValueError as error:
        raise ValueError("it has no header of safetensors") from error
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return header, memoryview(data)[end:]


def require_dtype(dtype: torch.dtype) -> None:
    """Check that files can hold it.

    Raises:
        ValueError: If not.
    """
    if dtype not in _DTYPES:
        names = ", ".join(str(one) for one in _DTYPES)
        raise ValueError(f"prefix_cache_dir keeps latents of {names}, got {dtype}")
