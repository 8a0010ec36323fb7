"""The folder that --save and --load name: its checkpoints, and how a new one is put there.

    SAVE/iter_0000100/                        a complete checkpoint
    SAVE/release/                             weights only, from no run of this script
    SAVE/.incomplete-iter_0000200/            being written, or what an interrupted save left
    SAVE/.replaced-iter_0000100/              the former one, while it is being replaced
    SAVE/latest_checkpointed_iteration.txt    the one to resume from

A checkpoint is renamed after all its bytes are on disk, and the text file is changed after that, so
the file names a complete checkpoint whenever a save is interrupted. Megatron's dist_checkpointing
leaves this to its caller.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from pathlib import Path

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
# A number, or RELEASE.
Iteration = int | str


def checkpoint_path(folder: Path, iteration: Iteration) -> Path:
    """Where the complete checkpoint of ``iteration`` is, under Megatron's name."""
    return folder / (RELEASE if iteration == RELEASE else f"iter_{iteration:07d}")


def latest_iteration(folder: Path) -> Iteration | None:
    """The iteration that ``folder``'s text file names; None if there is no such file.

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
        raise ValueError(f"{folder / LATEST} should hold an iteration or 'release', got {text!r}")
    return int(text)


def find_checkpoint(folder: str) -> Path:
    """The checkpoint to load from ``folder``: the latest of a run, or the folder itself.

    Raises:
        ValueError: If there is none.
    """
    root = Path(folder)
    if not root.is_dir():
        what = "it is no folder" if root.exists() else "there is no such folder"
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
    """How to convert the first of ``folders`` that holds another format; else an empty string."""
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
    """Make the empty folder to write the checkpoint of ``iteration`` into."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".incomplete-iter_*"):
        shutil.rmtree(leftover)
    path = unfinished_path(folder, iteration)
    path.mkdir()
    return path


def unfinished_path(folder: Path, iteration: Iteration) -> Path:
    """Where the checkpoint of ``iteration`` is while it is being written."""
    return _hidden(folder, "incomplete", iteration)


def complete(folder: Path, iteration: int) -> None:
    """Give the checkpoint its name and make it the one to resume from."""
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
    """Undo a replacement that was interrupted between its two renames; all ranks may call it."""
    replaced, final = _hidden(folder, "replaced", iteration), checkpoint_path(folder, iteration)
    if replaced.exists() and not final.exists():
        with contextlib.suppress(OSError):
            replaced.rename(final)


def _hidden(folder: Path, state: str, iteration: Iteration) -> Path:
    return folder / f".{state}-{checkpoint_path(folder, iteration).name}"


def _sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
