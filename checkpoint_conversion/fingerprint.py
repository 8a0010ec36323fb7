"""What the result of a conversion depends on: where it is the same, unfinished work can be used."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from checkpoint_conversion import __version__
from checkpoint_conversion.checkpoint_folder import weights_folder
from checkpoint_conversion.config_fields import dtype_name
from checkpoint_conversion.formats.base import Part, TargetOptions
from checkpoint_conversion.planning import ConversionPlan


def fingerprint_of(plan: ConversionPlan, options: TargetOptions, hf_config: Path | None) -> dict:
    """Everything that the result depends on, by what a user would call it; JSON can hold it.

    Args:
        plan: Of the conversion.
        options: Of the target, as the user gave them.
        hf_config: The config.json that the user gave, if any.
    """
    source = plan.checkpoint.path
    given = hf_config.read_bytes() if hf_config is not None else b""
    return {
        "tool version": __version__,
        "source": str(source.resolve()),
        "source file": source_files(source),
        "--hf-config": hashlib.sha256(given).hexdigest(),
        "format": plan.writer.format,
        "option": options_as_json(options),
        "part": {part.name: checksum_of(_entries(part)) for part in plan.parts},
    }


def options_as_json(options: TargetOptions) -> dict:
    """The options of a target, with names for dtypes."""
    fields = asdict(options)
    if options.dtype is not None:
        fields["dtype"] = dtype_name(options.dtype)
    return fields | fields.pop("layout")


def source_files(path: Path) -> dict[str, list[int]]:
    """Size and time of change of every file of a checkpoint, by relative path."""
    folder = weights_folder(path)
    result = {}
    for root, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            file = Path(root, name)
            if file.exists():
                status = file.stat()
                relative = file.relative_to(folder).as_posix()
                result[relative] = [status.st_size, status.st_mtime_ns]
    return result


def checksum_of(document: dict | list) -> str:
    """One line for a JSON document."""
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _entries(part: Part) -> list:
    return [
        (entry.key, entry.offset, entry.tensor.shape, str(entry.tensor.dtype))
        for entry in part.entries
    ]
