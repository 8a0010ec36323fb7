"""Writing with the Hugging Face writer as the conversion does, and safetensors files by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from checkpoint_conversion.formats.base import PartResult, TargetOptions
from checkpoint_conversion.formats.hugging_face import HuggingFaceCheckpoint
from checkpoint_conversion.formats.hugging_face_writer import HuggingFaceWriter
from tests.conversion.support import write_with

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def rewritten(
    source: HuggingFaceCheckpoint,
    folder: Path,
    options: TargetOptions | None = None,
    part_bytes: int = 1 << 20,
) -> tuple[HuggingFaceWriter, list[PartResult]]:
    """Write what a checkpoint holds to a new folder."""
    options = options or TargetOptions()
    folder.mkdir()
    writer = HuggingFaceWriter(source.config, options)
    tensors = source.hugging_face_tensors(options.dtype)
    return writer, write_with(writer, folder, tensors, part_bytes, source.auxiliary)


def safetensors_bytes(header: dict | bytes, data: bytes, header_size: int | None = None) -> bytes:
    """A safetensors file, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if header_size is None else header_size) + text + data


def described(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    """One tensor of a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def change_json(path: Path, **changes) -> None:
    """Replace fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
