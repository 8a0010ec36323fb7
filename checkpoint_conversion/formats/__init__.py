"""Checkpoint formats: opening a checkpoint, and the writer of a target."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint_conversion.checkpoint_folder import require_kind
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.source import Source

if TYPE_CHECKING:
    from checkpoint_conversion.formats.base import Checkpoint, TargetOptions, Writer
    from checkpoint_conversion.model import ModelConfig

_HERE = "checkpoint_conversion.formats"
# Formats that can be read, with their description in --help.
FORMATS = {
    "hf": "Hugging Face: config.json and sharded safetensors",
    "megatron": "distributed checkpoint (torch_dist) of a Megatron model with standard MLA",
    "megatron-legacy": "Megatron's older files, one model_optim_rng.pt per rank (read only)",
    "absorbed": "distributed checkpoint of this package's model",
}
# Modules are imported on first use, because they need torch.
_READERS = {
    "torch_dist": f"{_HERE}.torch_dist:TorchDistCheckpoint",
    "legacy": f"{_HERE}.legacy:LegacyCheckpoint",
    "hugging_face": f"{_HERE}.hugging_face:HuggingFaceCheckpoint",
}
_WRITERS = {
    "hf": f"{_HERE}.hugging_face:HuggingFaceWriter",
    "megatron": f"{_HERE}.torch_dist_writer:TorchDistWriter",
    "absorbed": f"{_HERE}.torch_dist_writer:TorchDistWriter",
}
# Formats that can be written.
TARGETS = tuple(_WRITERS)


def open_checkpoint(path: Path, **how: Any) -> Checkpoint:
    """Recognise the format of a folder and read its headers; ``how`` are fields of :class:`Source`.

    Raises:
        CheckpointError: If there is no checkpoint, or it cannot be read.
    """
    source, kind = Source(path, **how), require_kind(path)
    if kind == "hugging_face" and (source.hf_config is not None or source.drop_tokens):
        option = "--drop-tokens" if source.hf_config is None else "--hf-config"
        raise CheckpointError(
            f"{option} is for Megatron checkpoints; {path} is a Hugging Face folder with a "
            "config.json of its own"
        )
    return _load(_READERS[kind])(**vars(source))


def require_target(to: str) -> str:
    """The name of a format, if it can be written.

    Raises:
        CheckpointError: If it cannot, naming the formats that can.
    """
    if to in _WRITERS:
        return to
    what = "can be read, not written" if to in FORMATS else "is unknown"
    raise CheckpointError(f"format {to!r} {what}; --to can be {', '.join(TARGETS)}")


def writer_for(to: str, config: ModelConfig, options: TargetOptions) -> Writer:
    """The writer of format ``to``.

    Raises:
        CheckpointError: If the format cannot be written, or not with these options.
    """
    return _load(_WRITERS[require_target(to)])(config, options, to)


def _load(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)
