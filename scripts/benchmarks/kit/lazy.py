"""Modules that are imported when they are first used: ``--help`` needs no PyTorch."""

from __future__ import annotations

import importlib
from typing import Any


class lazy:
    """A module by name; the first attribute that is asked for imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
