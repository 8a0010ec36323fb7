"""The folder of --save and --load: finding its checkpoints, and adding one atomically.

    SAVE/iter_0000100/                        a complete checkpoint
    SAVE/release/                             weights only, written by the converter
    SAVE/.incomplete-iter_0000200/            being written, or left by an interrupted save
    SAVE/.replaced-iter_0000100/              the old checkpoint while a new one replaces it
    SAVE/latest_checkpointed_iteration.txt    which checkpoint to load

A checkpoint gets its name after all its bytes are on disk, and the text file is changed after that.
So the text file names a complete checkpoint even if a save is interrupted. Megatron's
dist_checkpointing leaves this to its caller.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
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


def begin(folder: Path, iteration: int) -> Path:
    """Create the empty folder that the checkpoint of ``iteration`` is written to."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".incomplete-iter_*"):
        shutil.rmtree(leftover)
    path = unfinished_path(folder, iteration)
    path.mkdir()
    return path


def unfinished_path(folder: Path, iteration: Iteration) -> Path:
    """Path of the checkpoint of ``iteration`` while it is being written."""
    return _hidden(folder, "incomplete", iteration)


def complete(folder: Path, iteration: int) -> None:
    """Give a checkpoint that has been written its name, and make it the latest one."""
    written, final = unfinished_path(folder, iteration), checkpoint_path(folder, iteration)
    for file in written.rglob("*"):
        _sync(file)
    _sync(written)
    replaced = _hidden(folder, "replaced", iteration)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    written.rename(final)
    _sync(folder)
    text = folder / f".{LATEST}"
    text.write_text(f"{iteration}\n")
    _sync(text)
    text.replace(folder / LATEST)
    _sync(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(folder: Path, iteration: Iteration) -> None:
    """Undo a replacement that was interrupted between its two renames; any rank may call it."""
    replaced, final = _hidden(folder, "replaced", iteration), checkpoint_path(folder, iteration)
    if replaced.exists() and not final.exists():
        with contextlib.suppress(OSError):
            replaced.rename(final)


def _hidden(folder: Path, state: str, iteration: Iteration) -> Path:
    return folder / f".{state}-{checkpoint_path(folder, iteration).name}"


def _sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
