"""The formats: recognising a checkpoint, opening it, and the writer of a target."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint_conversion.errors import CheckpointError

if TYPE_CHECKING:
    from checkpoint_conversion.formats.base import Checkpoint, TargetOptions, Writer
    from checkpoint_conversion.model_config import ModelConfig

_HERE = "checkpoint_conversion.formats"
# Format -> what --help says of it.
FORMATS = {
    "hf": "Hugging Face: config.json and sharded safetensors",
    "megatron": "distributed checkpoint (torch_dist) of a Megatron model with standard MLA",
    "megatron-legacy": "Megatron's older files, one model_optim_rng.pt per rank",
    "absorbed": "distributed checkpoint of this package's model",
}
# Most specific first; imported when needed, because each needs torch.
_READERS = {
    f"{_HERE}.torch_dist:TorchDistCheckpoint": (
        ".metadata and common.pt, in the folder or in the one that "
        "latest_checkpointed_iteration.txt names (megatron, absorbed)"
    ),
    f"{_HERE}.legacy:LegacyCheckpoint": (
        "mp_rank_*/model_optim_rng.pt, in the same places (megatron-legacy)"
    ),
    f"{_HERE}.hugging_face:HuggingFaceCheckpoint": "config.json beside *.safetensors (hf)",
}
_WRITERS = {
    "hf": f"{_HERE}.hugging_face_writer:HuggingFaceWriter",
    "megatron": f"{_HERE}.torch_dist_writer:TorchDistWriter",
    "megatron-legacy": f"{_HERE}.legacy_writer:LegacyWriter",
    "absorbed": f"{_HERE}.torch_dist_writer:TorchDistWriter",
}


def recognise(path: Path) -> Any | None:
    """The class that reads the checkpoint at ``path``; None if it is no checkpoint."""
    if not path.is_dir():
        return None
    readers = map(_find, _READERS)
    return next((reader for reader in readers if reader.recognises(path)), None)


def open_checkpoint(
    path: Path, hf_config: Path | None = None, follow_links: bool = False
) -> Checkpoint:
    """Recognise a checkpoint's format and read its headers.

    Args:
        path: Its folder.
        hf_config: A config.json for a Megatron checkpoint, instead of what it holds.
        follow_links: Whether links may lead out of the folder.

    Raises:
        CheckpointError: If there is no checkpoint, or it cannot be read.
    """
    reader = recognise(path)
    if reader is None:
        raise CheckpointError(f"{path} {_what_is_there(path)}. Looked for:", [*_READERS.values()])
    if reader is _find(f"{_HERE}.hugging_face:HuggingFaceCheckpoint"):
        if hf_config is not None:
            raise CheckpointError(
                f"--hf-config is for Megatron checkpoints; {path} is a Hugging Face folder with a "
                "config.json of its own"
            )
        return reader(path, follow_links=follow_links)
    return reader(path, hf_config=hf_config, follow_links=follow_links)


def writer_for(to: str, config: ModelConfig, options: TargetOptions) -> Writer:
    """The writer of format ``to``.

    Raises:
        CheckpointError: If there is no such format, or it cannot do what the options ask for.
    """
    if to not in FORMATS:
        raise CheckpointError(f"unknown format {to!r}; there are {', '.join(FORMATS)}")
    return _find(_WRITERS[to])(config, options, to)


def _find(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def _what_is_there(path: Path) -> str:
    if not path.exists():
        return "does not exist"
    if not path.is_dir():
        return "is a file; a checkpoint is a folder"
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "is empty"
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"is no checkpoint of a known format; it holds {shown}"
