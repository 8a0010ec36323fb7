"""Checkpoints that are complete or not there, and one line where a disk is full.

    SAVE/iter_0000100/                        a complete checkpoint
    SAVE/release/                             weights only, written by the converter
    SAVE/.incomplete/                         being written, or left by an interrupted save
    SAVE/.replaced-iter_0000100/              the old checkpoint while a new one replaces it
    SAVE/latest_checkpointed_iteration.txt    which checkpoint to load

A checkpoint gets its name after all its bytes are on disk, and the text file is changed after that.
So the text file names a complete checkpoint even if a save is interrupted, which Megatron's own
``save_checkpoint`` leaves to chance.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import shutil
from collections.abc import Iterator
from pathlib import Path

from training.checkpoint import LATEST, Iteration, checkpoint_path, latest_iteration

_INCOMPLETE = ".incomplete"
# What torch says when a file of its own ended too early; the system's reason is lost.
_TOO_SHORT = "inline_container"
_PLAIN = (bool, int, float, str, type(None))
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


def save_checkpoint(iteration: int, *state, **options) -> None:
    """Megatron's ``save_checkpoint``, whose checkpoint gets its name when it is complete.

    Collective over all ranks. The arguments that are saved hold plain values only.

    Raises:
        OSError: If it cannot be written, as on a full disk; former ones stay as they are.
    """
    import torch.distributed as dist
    from megatron.training import checkpointing, get_args, global_vars

    from training.megatron_loop import quiet

    args = get_args()
    folder, first = Path(args.save), dist.get_rank() == 0
    plain = {name: value for name, value in vars(args).items() if _is_plain(value)}
    with write_errors(folder, iteration):
        if first:
            begin(folder)
        dist.barrier()
        _write_in_this_process()
        global_vars.set_args(argparse.Namespace(**plain | {"save": str(folder / _INCOMPLETE)}))
        try:
            with quiet():
                checkpointing.save_checkpoint(iteration, *state, **options)
        finally:
            global_vars.set_args(args)
        if first:
            complete(folder, iteration)
        dist.barrier()


def load_checkpoint(model: list, optimizer, *state, **options) -> tuple:
    """Megatron's ``load_checkpoint``, but the optimizer's options stay those of this run.

    Raises:
        ValueError: If the checkpoint cannot be read, or does not fit.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.training import checkpointing, get_args

    args, load_state_dict = get_args(), optimizer.load_state_dict
    own = {
        "max_lr": args.lr,
        "min_lr": args.min_lr,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_eps,
    }

    def load_with_own_options(found: dict) -> None:
        # With experts Megatron has several optimizers, numbered in the state.
        for part in found.values() if 0 in found else (found,):
            for group in part.get("optimizer", part).get("param_groups", ()):
                group.update({name: value for name, value in own.items() if name in group})
        load_state_dict(found)

    optimizer.load_state_dict = load_with_own_options
    try:
        return checkpointing.load_checkpoint(model, optimizer, *state, **options)
    except CheckpointingException as error:
        raise ValueError(f"--load: {args.load} cannot be read: {error}") from error
    finally:
        del optimizer.load_state_dict


def _is_plain(value: object) -> bool:
    import torch

    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, torch.dtype))


def begin(folder: Path) -> None:
    """Remove what an interrupted save has left, and make room for the next."""
    shutil.rmtree(folder / _INCOMPLETE, ignore_errors=True)
    (folder / _INCOMPLETE).mkdir(parents=True)


def complete(folder: Path, iteration: int) -> None:
    """Give a checkpoint that has been written its name, and make it the latest one."""
    final = checkpoint_path(folder, iteration)
    written = folder / _INCOMPLETE / final.name
    for file in written.rglob("*"):
        _sync(file)
    _sync(written)
    replaced = folder / f".replaced-{final.name}"
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
    for done in (replaced, folder / _INCOMPLETE):
        shutil.rmtree(done, ignore_errors=True)


def recover(folder: Path, iteration: Iteration) -> None:
    """Undo a replacement that was interrupted between its two renames; any rank may call it."""
    final = checkpoint_path(folder, iteration)
    replaced = folder / f".replaced-{final.name}"
    if replaced.exists() and not final.exists():
        with contextlib.suppress(OSError):
            replaced.rename(final)


def _sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_in_this_process() -> None:
    """Have no process started that passes on what was written.

    Megatron starts one on every rank, for writers in processes of their own, which are not used
    here. It imports PyTorch and Megatron: five seconds of a core before the first checkpoint.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if getattr(filesystem_async, "_results_queue", False) is None:
        filesystem_async._results_queue = queue.SimpleQueue()


@contextlib.contextmanager
def write_errors(folder: Path, iteration: int) -> Iterator[None]:
    """Make every failure to write a checkpoint an ``OSError`` of one line.

    Args:
        folder: ``--save``.
        iteration: Of the checkpoint.

    Raises:
        OSError: Naming the folder, the reason, the space that is left, and the checkpoint that
            stays the latest.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with _logged_errors() as logged:
        try:
            yield
        except (OSError, CheckpointException, RuntimeError) as error:
            if (reason := _reason(error, logged)) is None:
                raise
            usage, latest = shutil.disk_usage(folder), latest_iteration(folder)
            before = "no checkpoint is there"
            if latest is not None:
                before = f"iteration {latest} stays the latest"
            raise OSError(
                f"--save {folder}: iteration {iteration} could not be written: {reason} (its disk "
                f"has {usage.free / 1e6:,.1f} of {usage.total / 1e6:,.1f} MB free); {before}"
            ) from error


def _reason(error: BaseException, logged: list[str]) -> str | None:
    """Why a save failed; None for a mistake of the program."""
    if isinstance(error, OSError):
        places = [str(place) for place in (error.filename, error.filename2) if place is not None]
        return ": ".join([error.strerror or str(error), *places])
    if any(_TOO_SHORT in text for text in (str(error), *logged)):
        return "torch could not write all of it, the disk may be full"
    return None if isinstance(error, RuntimeError) else next(iter(logged), str(error))


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """The errors that Megatron's writer logs and does not raise, in place of their output."""
    found: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            found.append(record.getMessage())
        return record.levelno < logging.ERROR

    logger = logging.getLogger(_WRITER)
    logger.addFilter(keep)
    try:
        yield found
    finally:
        logger.removeFilter(keep)
