"""What a family of kernels declares, and all families."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import Draw


class Config(Draw):
    """Draws what kernels are compiled for: dtypes, widths, heads and so on.

    Each is kept as an attribute, and is the same in all cases of a configuration.
    """

    def __str__(self) -> str:
        kept = (f"{k}={v}" for k, v in vars(self).items() if k not in self.OWN)
        return f"Config({', '.join(kept)})"


Run = Callable[[Config, Draw, Comparison], None]


@dataclass(frozen=True)
class Family:
    """Kernels that are called together."""

    name: str  # what ``--only`` takes
    kernels: tuple[str, ...]  # that its cases launch, as ``module.function`` below absorbed_mla
    run: Run  # draws a configuration and the rest of a case, calls the kernels and compares
    hopper: bool = False  # whether kernels are Gluon's, which need compute capability 9.0
    share: float = 1.0  # of the workers' time, relative to other families

    def launches(self, kernel: str) -> bool:
        """Whether it launches a kernel, which is given by the end of its name."""
        return any(f".{one}".endswith(f".{kernel}") for one in self.kernels)


_families: dict[str, Family] = {}


def family(name: str, *kernels: str, hopper: bool = False, share: float = 1.0) -> Callable:
    """Declares the family of a function, see :class:`Family`."""

    def declare(run: Run) -> Run:
        assert name not in _families, name
        _families[name] = Family(name, kernels, run, hopper, share)
        return run

    return declare


def all_families() -> dict[str, Family]:
    """By name, those of all files of ``families/``."""
    # They import this module.
    from checks.fuzz import families

    for module in sorted(each.name for each in pkgutil.iter_modules(families.__path__)):
        importlib.import_module(f"{families.__name__}.{module}")
    return dict(_families)


def named(families: dict[str, Family], names: list[str] | None) -> dict[str, Family]:
    """The families of these names, or that launch kernels whose names end so; None: all.

    Raises:
        ValueError: If there is none of some name.
    """
    if names is None:
        return families
    found = {}
    for name in names:
        own = {n: f for n, f in families.items() if n == name or f.launches(name)}
        if not own:
            known = ", ".join(families)
            raise ValueError(f"--only must be families or kernels, got {name!r}; families: {known}")
        found.update(own)
    return found
