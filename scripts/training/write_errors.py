"""A checkpoint that cannot be written, as when the disk is full: one error, in one line."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from training.checkpoint_folder import latest_iteration

# What torch says when a file of its own ended too early; the system's reason is lost.
_TOO_SHORT = "inline_container"


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
    with _logged_errors() as logged:
        try:
            yield
        except (OSError, CheckpointException) as error:
            raise OSError(_message(folder, iteration, _reason(error, logged))) from error
        except RuntimeError as error:
            if _TOO_SHORT not in str(error):
                raise
            raise OSError(_message(folder, iteration, _reason(error, logged))) from error


def _message(folder: Path, iteration: int, reason: str) -> str:
    usage = shutil.disk_usage(folder)
    latest = latest_iteration(folder)
    before = "no checkpoint is there" if latest is None else f"iteration {latest} stays the latest"
    return (
        f"--save {folder}: iteration {iteration} could not be written: {reason} (its disk has "
        f"{usage.free / 1e6:,.1f} of {usage.total / 1e6:,.1f} MB free); {before}"
    )


def _reason(error: BaseException, logged: list[str]) -> str:
    if isinstance(error, OSError):
        places = [str(place) for place in (error.filename, error.filename2) if place is not None]
        return ": ".join([error.strerror or str(error), *places])
    details = [str(error), *logged]
    if any(_TOO_SHORT in text for text in details):
        return "torch could not write all of it, the disk may be full"
    return next(iter(logged), str(error))


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """The errors that Megatron's writer logs and does not raise, in place of their output."""
    found: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            found.append(record.getMessage())
        return record.levelno < logging.ERROR

    logger = logging.getLogger(filesystem_async.__name__)
    logger.addFilter(keep)
    try:
        yield found
    finally:
        logger.removeFilter(keep)
