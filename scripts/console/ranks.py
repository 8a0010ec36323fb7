"""The processes of a job as its launcher describes them in the environment."""

from __future__ import annotations

import os
from pathlib import Path


def world_size() -> int:
    """Number of processes, from torchrun; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """This process, from torchrun; 0 without it."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """This process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def error_file(of_local_rank: int) -> Path | None:
    """Where torchrun looks for the reason why a process of this machine failed.

    torchrun names each process its own, ``.../attempt_0/<local rank>/error.json``.

    Args:
        of_local_rank: The process.

    Returns:
        None without torchrun, or where it keeps no such files.
    """
    own = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
    if own == Path(os.devnull) or own.parent.name != str(local_rank()):
        return None
    return own.parent.with_name(str(of_local_rank)) / own.name
