"""The folder of a Megatron checkpoint, in either format of its weights.

DST/latest_checkpointed_iteration.txt     "release", or the number of an iteration
DST/release/  or  DST/iter_0000100/       the weights
DST/release/hugging_face/                 config.json and tokenizer, which Megatron does not store
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from checkpoint_conversion.checkpoint_folder import (
    CONFIG,
    MAX_CONFIG_BYTES,
    TRACKER,
    files_inside,
    read_json,
)
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.megatron_args import from_megatron_args
from checkpoint_conversion.model import ModelConfig

AUXILIARY = "hugging_face"


def inner_name(iteration: int | None) -> str:
    """Name of the weights' folder; ``iteration`` None means a release."""
    return "release" if iteration is None else f"iter_{iteration:07d}"


def auxiliary_files(inner: Path, follow_links: bool) -> dict[str, Path]:
    """Files of the model beside the weights, by name.

    Args:
        inner: The folder of the weights.
        follow_links: Whether links may lead out of it.

    Raises:
        CheckpointError: If a link leads out of it and may not.
    """
    folder = inner / AUXILIARY
    return files_inside(folder, follow_links=follow_links) if folder.is_dir() else {}


def read_config(
    hf_config: Path | None, auxiliary: Mapping[str, Path], args: Mapping[str, object]
) -> ModelConfig:
    """The model's config, from the first source that there is.

    Args:
        hf_config: The config.json that the user gave.
        auxiliary: Files beside the weights, perhaps with a config.json.
        args: The training's arguments; empty if the checkpoint has none.

    Raises:
        CheckpointError: If there is no source, or it describes a model that cannot be converted.
    """
    path = hf_config or auxiliary.get(CONFIG)
    if path is not None:
        return ModelConfig.from_hugging_face(read_json(path, MAX_CONFIG_BYTES))
    if args:
        return from_megatron_args(args)
    raise CheckpointError(
        f"nothing says what the model is: the checkpoint has neither args nor "
        f"{AUXILIARY}/{CONFIG}; give its config.json with --hf-config"
    )


def write_around(
    folder: Path, iteration: int | None, config: ModelConfig, auxiliary: Mapping[str, Path]
) -> None:
    """Write the tracker file, config.json and the auxiliary files.

    Args:
        folder: The checkpoint's folder, above the weights' folder.
        iteration: Of the checkpoint; None for a release.
        config: Content of config.json.
        auxiliary: Files to copy beside it, by name; a config.json among them is ignored.
    """
    beside = folder / inner_name(iteration) / AUXILIARY
    beside.mkdir(parents=True, exist_ok=True)
    for name, path in auxiliary.items():
        if name != CONFIG:
            shutil.copyfile(path, beside / name)
    (beside / CONFIG).write_text(json.dumps(config.hugging_face, indent=2) + "\n")
    (folder / TRACKER).write_text("release" if iteration is None else str(iteration))
