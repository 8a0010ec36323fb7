"""The folder around a Megatron checkpoint, whatever format its weights have.

DST/latest_checkpointed_iteration.txt     "release", or the number of an iteration
DST/release/  or  DST/iter_0000100/       the weights
DST/release/hugging_face/                 config.json, tokenizer: what Megatron does not keep
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from checkpoint_conversion.checkpoint_folder import TRACKER
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.megatron_args import from_megatron_args
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.safe_paths import files_inside, read_json

AUXILIARY = "hugging_face"
CONFIG = "config.json"
_MOST_CONFIG_BYTES = 16 << 20


def inner_name(iteration: int | None) -> str:
    """The folder of an iteration's weights, or of a release's."""
    return "release" if iteration is None else f"iter_{iteration:07d}"


def auxiliary_files(inner: Path, follow_links: bool) -> dict[str, Path]:
    """Files of the model beside the weights, by name.

    Args:
        inner: The folder of the weights.
        follow_links: Whether links may lead out of it.

    Raises:
        CheckpointError: If a link does and may not.
    """
    folder = inner / AUXILIARY
    return files_inside(folder, follow_links=follow_links) if folder.is_dir() else {}


def read_config(
    hf_config: Path | None, auxiliary: Mapping[str, Path], args: Mapping[str, object]
) -> ModelConfig:
    """The model of a Megatron checkpoint.

    Args:
        hf_config: A config.json that comes first.
        auxiliary: Files beside the weights; a config.json among them comes second.
        args: Of the training, if the checkpoint has them.

    Raises:
        CheckpointError: If nothing says what the model is, or what says it cannot be converted.
    """
    path = hf_config or auxiliary.get(CONFIG)
    if path is not None:
        return ModelConfig.from_hugging_face(read_json(path, _MOST_CONFIG_BYTES))
    if args:
        return from_megatron_args(args)
    raise CheckpointError(
        f"nothing says what the model is: the checkpoint has neither args nor "
        f"{AUXILIARY}/{CONFIG}; give its config.json with --hf-config"
    )


def write_around(
    folder: Path, iteration: int | None, config: ModelConfig, auxiliary: Mapping[str, Path]
) -> None:
    """Write what surrounds the weights.

    Args:
        folder: That holds the weights' folder.
        iteration: None for a release.
        config: What config.json shall say.
        auxiliary: Files to copy; config.json among them is written anew.
    """
    beside = folder / inner_name(iteration) / AUXILIARY
    beside.mkdir(parents=True, exist_ok=True)
    for name, path in auxiliary.items():
        if name != CONFIG:
            shutil.copyfile(path, beside / name)
    (beside / CONFIG).write_text(json.dumps(config.hugging_face, indent=2) + "\n")
    (folder / TRACKER).write_text("release" if iteration is None else str(iteration))
