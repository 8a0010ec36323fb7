"""Ranks of the job, from the environment variables that torchrun sets."""

from __future__ import annotations

import os
from pathlib import Path


def world_size() -> int:
    """Number of processes; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Rank of this process; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Rank of this process on its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", 0))


def error_file(of_local_rank: int) -> Path | None:
    """The file in which torchrun expects the reason for the failure of a process of this machine.

    torchrun sets the file of each process in its environment:
    ``.../attempt_0/<local rank>/error.json``.

    Returns:
        None without torchrun, or if it was told to keep no such files.
    """
    own = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
    if own == Path(os.devnull) or own.parent.name != str(local_rank()):
        return None
    return own.parent.with_name(str(of_local_rank)) / own.name
