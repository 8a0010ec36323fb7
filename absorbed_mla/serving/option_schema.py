"""Options as dataclass fields: name, type, default, bounds, help and what excludes an option.

    @documented
    @dataclass(frozen=True, kw_only=True)
    class Sizes(Options):
        '''Sizes of a cache.'''

        cache_tokens: int | None = option(None, least=64, unset="what fits", help="tokens it holds")

Such an entry is the only place that knows the option. Checks of values and the documentation of
the class are derived here, flags of command lines in ``option_flags.py``, JSON in
``server/protocol.py``, and tables of the documentation in ``scripts/checks/option_tables.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)
_KEY = "option"
# Of an option that asks for nothing, or gives way to others.
_NOT_IN_USE = (None, False, "auto")


class _Given:
    """Stands for any value, other than None, that is given."""


GIVEN = _Given()
REQUIRED = _Given()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a class of :class:`Options`.

    Attributes:
        help: What it is, in a phrase without a full stop, for ``--help`` and tables.
        details: Further sentences, for the documentation of the class.
        unset: In words, what None means where it is the default.
        least: Smallest number.
        above: The number must be greater than this.
        most: Largest number.
        also: Values beyond these bounds.
        choices: All values, in place of bounds.
        valid: Whether a value is accepted, in place of bounds; ``accepted`` says it in words.
        accepted: Values in words; ``""`` for those of bounds and choices.
        note: Said after them.
        needs: Other option -> its values that go with this one in use; :data:`GIVEN` is any but
            None. Options that a class lacks do not count, so that two classes may share an entry.
        of_engine: The engine's option that gets this one of ``LLM``, if it has another name.
        builds_model: Whether it decides how a model is read and built, so that a live model has it.
        flag: On command lines, if not ``--`` and the name.
        metavar: Of the flag's value; ``""`` for one by its type.
        flag_help: Of the flag, by the value that it gives, where ``help`` does not fit.
        name: Of the field, like what follows.
        annotation: Its type.
        default: Its default; :data:`REQUIRED` for one that must be given.
    """

    help: str
    details: str = ""
    unset: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    also: tuple = ()
    choices: tuple = ()
    valid: Callable[[Any], bool] | None = None
    accepted: str = ""
    note: str = ""
    needs: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    of_engine: str = ""
    builds_model: bool = False
    flag: str = ""
    metavar: str = ""
    flag_help: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    name: str = ""
    annotation: Any = None
    default: Any = REQUIRED

    @functools.cached_property
    def kinds(self) -> tuple[Any, ...]:
        """The types of its values, without None's."""
        union = typing.get_origin(self.annotation) in (typing.Union, types.UnionType)
        members = typing.get_args(self.annotation) if union else (self.annotation,)
        return tuple(kind for kind in members if kind is not type(None))

    @functools.cached_property
    def optional(self) -> bool:
        """Whether it may be None."""
        return type(None) in typing.get_args(self.annotation)

    @functools.cached_property
    def values(self) -> tuple:
        """All its values but None, if they are few."""
        return self.choices or ((False, True) if self.kinds == (bool,) else ())

    @functools.cached_property
    def words(self) -> str:
        """What it accepts; ``""`` if that is anything of its type."""
        found = self.accepted or self._words_of_values() or self._words_of_bounds()
        others = [*self.also, *([None] if self.optional else [])]
        return ", or ".join(map(str, [found, *others])) + self.note if found else ""

    def _words_of_values(self) -> str:
        return f"one of {', '.join(map(str, self.values))}" if self.values else ""

    def _words_of_bounds(self) -> str:
        low = "" if self.least is None else f"at least {self.least}"
        low = low if self.above is None else f"above {self.above}"
        high = "" if self.most is None else f"at most {self.most}"
        found = " and ".join(filter(None, (low, high)))
        both = self.least is not None and self.most is not None
        if both:
            found = f"from {self.least} to {self.most}"
        if self.kinds != (int,):
            return found
        return f"an integer {'' if both or not found else 'of '}{found}".strip()

    def accepts(self, value: Any) -> bool:
        """Whether a value is of its type and within its bounds."""
        if value is None and self.optional:
            return True
        try:
            return value in self.also or self._is_valid(value)
        except TypeError:
            return False

    def _is_valid(self, value: Any) -> bool:
        if self.valid is not None:
            return self.valid(value)
        if self.values:
            return value in self.values
        if self.kinds == (int,):
            if not isinstance(value, int) or isinstance(value, bool):
                return False
        elif self.kinds != (float,):
            return True
        low = -math.inf if self.least is None else self.least
        high = math.inf if self.most is None else self.most
        # In this order NaN is refused, too.
        above = self.above is None or value > self.above
        return above and low <= value <= high and abs(value) < math.inf


def option(default: Any = REQUIRED, **entry: Any) -> Any:
    """The field of an option.

    Args:
        default: Its default, if it need not be given.
        entry: Attributes of :class:`Option`.
    """
    return _field(default, Option(**entry))


def like(cls: type, name: str, **changes: Any) -> Any:
    """The field of an option of ``LLM`` that its engine has in another way, with what differs.

    Args:
        cls: Class of the engine's option.
        name: Of the engine's option.
        changes: Attributes of :class:`Option` that differ.
    """
    other = options_of(cls)[name]
    default = changes.pop("default", other.default)
    return _field(default, dataclasses.replace(other, of_engine=name, **changes))


def _field(default: Any, entry: Option) -> Any:
    if default is REQUIRED:
        return dataclasses.field(metadata={_KEY: entry})
    if isinstance(default, Mapping):
        return dataclasses.field(
            default_factory=functools.partial(dict, default), metadata={_KEY: entry}
        )
    return dataclasses.field(default=default, metadata={_KEY: entry})


@functools.cache
def options_of(cls: type) -> Mapping[str, Option]:
    """Options of a class by name, its own before those of its bases."""
    hints = typing.get_type_hints(cls)
    owners = [inspect.get_annotations(one) for one in cls.__mro__]
    fields = {field.name: field for field in dataclasses.fields(cls) if _KEY in field.metadata}
    order = dict.fromkeys(name for names in owners for name in names if name in fields)
    found = {}
    for name in order:
        field = fields[name]
        default = REQUIRED if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found[name] = dataclasses.replace(
            field.metadata[_KEY], name=name, annotation=hints[name], default=default
        )
    return types.MappingProxyType(found)


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
    cls = type(options)
    for other, accepted in needs_of(cls, name).items():
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


def documented(cls: _Class) -> _Class:
    """Adds an ``Attributes`` section of all its options to a class's docstring."""
    lines = [(cls.__doc__ or "").rstrip(), "", "    Attributes:"]
    for name, one in options_of(cls).items():
        text = f"{name}: {one.help[0].upper()}{one.help[1:]}. {one.details}".rstrip()
        lines += textwrap.wrap(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 12)
    cls.__doc__ = "\n".join(lines) + "\n"
    return cls
