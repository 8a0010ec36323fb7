"""All families."""

from __future__ import annotations

import importlib
import pkgutil

from checks.fuzz import families
from checks.fuzz.family import Family


def all_families() -> dict[str, Family]:
    """By name, in the order of files."""
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
        own = {n: f for n, f in families.items() if n == name or _launches(f, name)}
        if not own:
            known = ", ".join(families)
            raise ValueError(f"--only must be families or kernels, got {name!r}; families: {known}")
        found.update(own)
    return found


def _launches(family: Family, name: str) -> bool:
    return any(f".{kernel}".endswith(f".{name}") for kernel in family.kernels)
