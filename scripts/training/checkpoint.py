"""The checkpoint of --load: where it is, and what it contains."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
# The number of an iteration, or RELEASE.
Iteration = int | str


def checkpoint_path(folder: Path, iteration: Iteration) -> Path:
    """Path of the complete checkpoint of ``iteration``, named as Megatron does."""
    return folder / (RELEASE if iteration == RELEASE else f"iter_{iteration:07d}")


def latest_iteration(folder: Path) -> Iteration | None:
    """The iteration in the text file of ``folder``; None if there is no such file.

    Raises:
        ValueError: If the file holds neither a number nor ``"release"``.
    """
    try:
        text = (folder / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    if text == RELEASE:
        return RELEASE
    if not text.isdigit():
        raise ValueError(f"{folder / LATEST} must contain an iteration or 'release', got {text!r}")
    return int(text)


def find_checkpoint(folder: str) -> Path:
    """Path of the checkpoint to load: the latest in ``folder``, or ``folder`` itself.

    Raises:
        ValueError: If there is none.
    """
    from training.saving import recover

    root = Path(folder)
    if not root.is_dir():
        what = "it is not a folder" if root.exists() else "there is no such folder"
        raise ValueError(f"--load {folder}: {what}")
    path = root
    iteration = latest_iteration(root)
    if iteration is not None:
        recover(root, iteration)
        path = checkpoint_path(root, iteration)
    if not (path / "metadata.json").is_file():
        raise ValueError(
            f"--load: there is no distributed checkpoint in {path} (no metadata.json)"
            + _conversion_hint(root, path)
        )
    return path


def _conversion_hint(*folders: Path) -> str:
    """The command that converts a checkpoint of another format; empty if there is none."""
    for folder in folders:
        what = ""
        if (folder / "config.json").is_file() or any(folder.glob("*.safetensors")):
            what = "a Hugging Face checkpoint"
        elif any(folder.glob("mp_rank_*")) or any(folder.glob("*/mp_rank_*")):
            what = "a checkpoint with a file for each rank"
        if what:
            command = f"absorbed-mla-convert convert {shlex.quote(str(folder))} OUT --to absorbed"
            return f"; it is {what}: {command} makes one"
    return ""


@dataclass(frozen=True)
class Start:
    """A checkpoint to start from.

    Attributes:
        path: Its folder.
        args: The arguments in it, which describe its model and its run; None if it has none.
        iteration: To resume at; None if only the weights are used.
    """

    path: Path
    args: argparse.Namespace | None
    iteration: int | None = None


def read_start(folder: str, *, finetune: bool) -> Start:
    """Find a checkpoint, and read the description of its model and its run.

    Args:
        folder: Value of ``--load``.
        finetune: Whether only its weights are used.

    Raises:
        ValueError: If there is no checkpoint, it cannot be read, or its run cannot be resumed.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    path = find_checkpoint(folder)
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
    except CheckpointingException as error:
        raise ValueError(f"--load: {path} cannot be read: {error}") from error
    args = common.get("args")
    args = args if isinstance(args, argparse.Namespace) else None
    ours = hasattr(args, "data_fingerprint")
    # A release has weights only; so may a checkpoint whose own folder is given.
    if finetune or path.name == RELEASE or (not ours and path == Path(folder)):
        return Start(path, args)
    if not ours:
        raise ValueError(
            f"--load: {path} was not written by this script, so it cannot be resumed; "
            "--finetune takes its weights"
        )
    iteration = common["iteration"]
    if path.name != checkpoint_path(path, iteration).name:
        named = checkpoint_path(path.parent, iteration)
        raise ValueError(
            f"--load: {path} must be called {named} to be resumed; --finetune takes its weights"
        )
    return Start(path, args, iteration)


def load_model_args(folder: str) -> argparse.Namespace:
    """The arguments that describe the model of the checkpoint in ``folder``.

    Raises:
        ValueError: If there is no checkpoint, or no arguments in it.
    """
    start = read_start(folder, finetune=True)
    if start.args is None:
        raise ValueError(
            f"--load: {start.path} contains no arguments that describe its model; describe it by "
            "--preset and the options for single sizes"
        )
    return start.args
