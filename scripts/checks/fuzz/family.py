"""What a family of kernels declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import Draw


@dataclass(frozen=True)
class Family:
    """Kernels that are called together.

    Attributes:
        name: What ``--only`` takes.
        kernels: That its cases launch, as ``module.function`` below ``absorbed_mla``.
        configure: Draws what kernels are compiled for: dtypes, widths, heads.
        run: Draws the rest of a case with a configuration, calls the kernels and compares.
        hopper: Whether kernels are Gluon's, which need compute capability 9.0.
        share: Of the workers' time, relative to other families.
    """

    name: str
    kernels: tuple[str, ...]
    configure: Callable[[Draw], Any]
    run: Callable[[Any, Draw, Comparison], None]
    hopper: bool = False
    share: float = 1.0
