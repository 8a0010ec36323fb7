"""One way to break the package."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One wrong line: in ``file``, ``right`` becomes ``wrong``."""

    file: str
    right: str
    wrong: str
