"""What a family of kernels declares, and all families."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Self

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import Draw


class Config(SimpleNamespace):
    """What kernels are compiled for: dtypes, widths, heads and so on, by name."""

    def but(self, **changes: object) -> Self:
        """The same with other values."""
        return type(self)(**{**vars(self), **changes})


@dataclass(frozen=True)
class Family:
    """Kernels that are called together.

    Attributes:
        name: What ``--only`` takes.
        kernels: That its cases launch, as ``module.function`` below ``absorbed_mla``.
        configure: Draws what kernels are compiled for.
        run: Draws the rest of a case with a configuration, calls the kernels and compares.
        hopper: Whether kernels are Gluon's, which need compute capability 9.0.
        share: Of the workers' time, relative to other families.
    """

    name: str
    kernels: tuple[str, ...]
    configure: Callable[[Draw], Config]
    run: Callable[[Config, Draw, Comparison], None]
    hopper: bool = False
    share: float = 1.0

    def launches(self, kernel: str) -> bool:
        """Whether it launches a kernel, which is given by the end of its name."""
        return any(f".{one}".endswith(f".{kernel}") for one in self.kernels)


def below(package: str, *names: str) -> tuple[str, ...]:
    """Names of kernels in the modules of a package."""
    return tuple(f"{package}.{name}" for name in names)


def all_families() -> dict[str, Family]:
    """By name, in the order of the files of ``families/``."""
    # They import this module.
    from checks.fuzz import families

    found = {}
    for module in sorted(each.name for each in pkgutil.iter_modules(families.__path__)):
        for family in importlib.import_module(f"{families.__name__}.{module}").FAMILIES:
            assert family.name not in found, family.name
            found[family.name] = family
    return found


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
