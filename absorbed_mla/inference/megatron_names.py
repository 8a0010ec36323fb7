"""Names of Megatron's objects that the package uses beyond the documented ones: are they there?

Other versions of Megatron may have other names. What needs one says so before work starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core import __version__


def missing_name(owner: object, names: Sequence[str]) -> str:
    """The first of these names that a Megatron object or class has not, or ``""``.

    Returns:
        Such as ``"megatron-core 0.19.2 has no DynamicInferenceEngine._add_request"``.
    """
    for name in names:
        if not hasattr(owner, name):
            cls = owner if isinstance(owner, type) else type(owner)
            return f"megatron-core {__version__} has no {cls.__name__}.{name}"
    return ""


def require_names(owner: object, names: Sequence[str], what: str) -> None:
    """Refuse what cannot run without these names.

    Args:
        owner: Megatron's object or class.
        names: Of its attributes.
        what: That needs them: the option, or the class of the package.

    Raises:
        ValueError: Naming the first one that is missing.
    """
    if missing := missing_name(owner, names):
        raise ValueError(f"{what} cannot run: {missing}")
