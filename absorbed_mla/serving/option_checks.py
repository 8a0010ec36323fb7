"""Checks of options: each by itself, and what those in use need of others."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from absorbed_mla.serving.option_schema import GIVEN, options_of

# Of an option that asks for nothing, or gives way to others.
_NOT_IN_USE = (None, False, "auto")


class Options:
    """Base of dataclasses of options; checks them on construction."""

    def __post_init__(self) -> None:
        require_accepted(self)
        require_needs(self)


def require_accepted(options: Any) -> None:
    """Check each option by itself.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    for name, one in options_of(type(options)).items():
        value = getattr(options, name)
        if value is not one.default and not one.accepts(value):
            raise ValueError(f"{name} must be {one.words}, got {value!r}")


def require_needs(options: Any) -> None:
    """Check that the options in use go with the others.

    Raises:
        ValueError: Naming the two options, what the second one must be and what it is.
    """
    for name in names_with_needs(type(options)):
        if in_use(options, name):
            for other, accepted in unmet_needs(options, name):
                needed = needed_words(type(options), other, accepted)
                raise ValueError(f"{name} needs {needed}, got {getattr(options, other)!r}")


def in_use(options: Any, name: str) -> bool:
    """Whether an option asks for something: it is not None, False, 0 or ``"auto"``."""
    return getattr(options, name) not in _NOT_IN_USE


def unmet_needs(options: Any, name: str) -> Iterator[tuple[str, tuple]]:
    """The other options that do not go with ``name`` in use, and the values that would."""
    for other, accepted in needs_of(type(options), name).items():
        if not _goes_with(accepted, getattr(options, other)):
            yield other, accepted


def excluding(options: Any, name: str, value: Any) -> Iterator[str]:
    """The options in use that do not go with another one, ``name``, if it has a value."""
    for own in names_with_needs(type(options)):
        accepted = needs_of(type(options), own).get(name)
        if accepted is not None and in_use(options, own) and not _goes_with(accepted, value):
            yield own


def _goes_with(accepted: tuple, value: Any) -> bool:
    # What adapts goes with everything.
    return value == "auto" or value in accepted or (GIVEN in accepted and value is not None)


@functools.cache
def names_with_needs(cls: type) -> tuple[str, ...]:
    """The options that need something of others."""
    return tuple(name for name in options_of(cls) if needs_of(cls, name))


@functools.cache
def needs_of(cls: type, name: str) -> Mapping[str, tuple]:
    """What an option needs of others, by their names in ``cls``."""
    known = options_of(cls)
    names = {one.of_engine or own: own for own, one in known.items()} | {own: own for own in known}
    return {names[other]: v for other, v in known[name].needs.items() if other in names}


def needed_words(cls: type, name: str, accepted: tuple) -> str:
    """``"form='absorbed' or 'auto'"``: an option and the values that another one needs."""
    if GIVEN in accepted:
        return name
    automatic = ("auto",) if "auto" in options_of(cls)[name].choices else ()
    return f"{name}={' or '.join(map(repr, (*accepted, *automatic)))}"
