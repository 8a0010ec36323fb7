"""Attention of other packages, which the benchmarks measure beside ours."""

from __future__ import annotations

import importlib
from types import ModuleType

from benchmarks.kit.report import Refused


def first_module(*names: str) -> ModuleType:
    """The first of these modules that can be imported.

    Raises:
        Refused: If none can, with the reasons.
    """
    reasons = []
    for name in names:
        try:
            return importlib.import_module(name)
        except Exception as error:  # compiled modules raise more than ImportError
            reasons.append(f"{name} cannot be imported ({error})")
    raise Refused("; ".join(reasons))
