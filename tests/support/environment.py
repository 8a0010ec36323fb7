"""The environment of programs that tests start."""

from __future__ import annotations

import os

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")


def without_launcher(**more: str) -> dict[str, str]:
    """This process's environment without torchrun's variables, and with ``more``."""
    return {name: value for name, value in os.environ.items() if name not in _LAUNCHER} | more
