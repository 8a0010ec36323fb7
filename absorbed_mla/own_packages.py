"""Check that ``specs`` and ``checkpoint_conversion`` are not shadowed by other packages.

Programs have packages of these names, too. Python takes the first that it finds on ``sys.path``,
and prefers those with an ``__init__.py``, which ``specs`` has not: one of theirs hides it from
anywhere.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path


def require_own_packages(*names: str) -> None:
    """Check that Python finds the packages that are installed beside this one.

    Args:
        names: Of ``"specs"`` and ``"checkpoint_conversion"``, those that will be imported.

    Raises:
        ValueError: Naming the package that was found, and what to do.
    """
    for name in names:
        own, found = Path(__file__).parent.parent / name, _found(name)
        if not any(_same(own, place) for place in found):
            remedy = "remove its __init__.py, so that Python joins the two"
            if (own / "__init__.py").exists():
                remedy = f"put {own.parent} before its folder in PYTHONPATH"
            raise ValueError(
                f"absorbed_mla needs its package {name!r} in {own}, but `import {name}` finds "
                f"{', '.join(found) or 'none'}: rename the other one, or {remedy}"
            )


def _found(name: str) -> list[str]:
    """Where Python finds a package: its folder, or those of a namespace package; a module's file.

    It need not run for that, so that a foreign package has no effect.
    """
    spec = importlib.util.find_spec(name)
    if spec is None:
        return []
    places: Iterable[str] | None = spec.submodule_search_locations
    return [*places] if places is not None else [str(spec.origin)]


def _same(own: Path, place: str) -> bool:
    try:
        return os.path.samefile(own, place)
    except OSError:
        return False
