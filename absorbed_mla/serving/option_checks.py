"""Checks of options: each by itself, and what those in use need of others."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from absorbed_mla.serving.option_schema import GIVEN, options_of

# Of an option that asks for nothing, or gives way to others.
_NOT_IN_USE = (None, False, "auto")


class Options:
    """Base of dataclasses of options; checks them on construction.

    Raises:
        ValueError: Naming the option, what it, or another that it needs, got and what is accepted.
    """

    def __post_init__(self) -> None:
        cls = type(self)
        for name, one in options_of(cls).items():
            value = getattr(self, name)
            if value is not one.default and not one.accepts(value):
                raise ValueError(f"{name} must be {one.words}, got {value!r}")
        for name in needs_in(cls):
            for other in unmet_needs(self, name) if _in_use(self, name) else ():
                needed = needed_words(cls, other, needs_in(cls)[name][other])
                raise ValueError(f"{name} needs {needed}, got {getattr(self, other)!r}")


@functools.cache
def needs_in(cls: type) -> Mapping[str, Mapping[str, tuple]]:
    """Options of a class that need something -> what they need of others, by their names in it."""
    known = options_of(cls)
    names = {one.of_engine or own: own for own, one in known.items()} | {own: own for own in known}
    needs = {
        own: {names[other]: accepted for other, accepted in one.needs.items() if other in names}
        for own, one in known.items()
    }
    return {own: others for own, others in needs.items() if others}


def unmet_needs(options: Options, name: str) -> Iterator[str]:
    """The other options that do not go with ``name`` in use."""
    for other, accepted in needs_in(type(options))[name].items():
        if not _goes_with(accepted, getattr(options, other)):
            yield other


def excluding(options: Options, name: str, value: Any) -> Iterator[str]:
    """The options in use that do not go with another one, ``name``, if it has a value."""
    for own, others in needs_in(type(options)).items():
        if name in others and _in_use(options, own) and not _goes_with(others[name], value):
            yield own


def needed_words(cls: type, name: str, accepted: tuple) -> str:
    """``"form='absorbed' or 'auto'"``: an option and the values that another one needs."""
    if GIVEN in accepted:
        return name
    automatic = ("auto",) if "auto" in options_of(cls)[name].choices else ()
    return f"{name}={' or '.join(map(repr, (*accepted, *automatic)))}"


def _in_use(options: Options, name: str) -> bool:
    return getattr(options, name) not in _NOT_IN_USE


def _goes_with(accepted: tuple, value: Any) -> bool:
    # What adapts goes with everything.
    return value == "auto" or value in accepted or (GIVEN in accepted and value is not None)
