"""Writing with the Hugging Face writer as the conversion does, and safetensors files by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from checkpoint_conversion.formats.base import PartResult, TargetOptions
from checkpoint_conversion.formats.hugging_face import HuggingFaceCheckpoint
from checkpoint_conversion.formats.hugging_face_writer import HuggingFaceWriter
from checkpoint_conversion.lazy_tensor import ReadSession

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def rewritten(
    source: HuggingFaceCheckpoint,
    folder: Path,
    options: TargetOptions | None = None,
    part_bytes: int = 1 << 20,
) -> tuple[HuggingFaceWriter, list[PartResult]]:
    """Write what a checkpoint holds to a new folder; the last part first."""
    options = options or TargetOptions()
    folder.mkdir()
    writer = HuggingFaceWriter(source.config, options)
    parts = writer.plan(source.hugging_face_tensors(options.dtype), part_bytes)
    results = {}
    for part in reversed(parts):
        with ReadSession() as session:
            results[part.name] = writer.write_part(folder, part, session, lambda nbytes: None)
    ordered = [results[part.name] for part in parts]
    writer.finish(folder, ordered, source.auxiliary)
    return writer, ordered


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
