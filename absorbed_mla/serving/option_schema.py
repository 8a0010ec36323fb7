"""Options as dataclass fields: name, type, default, bounds, help and what excludes an option.

    @documented
    @dataclass(frozen=True, kw_only=True)
    class Sizes(Options):
        '''Sizes of a cache.'''

        cache_tokens: int | None = option(None, least=64, unset="what fits")
        '''Tokens that it holds. More is said in further sentences.'''

Such an entry is the only place that knows the option. The documentation of the class is derived
and checked here; flags of command lines are derived in ``option_flags.py``, JSON in
``server/protocol.py``, and tables of the documentation in ``scripts/checks/tables/options.py``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)
_KEY = "option"
# Stand for any value but None that an option is given, and for the default of one that must be.
GIVEN, REQUIRED = object(), object()
# Characters of a value that an error shows.
_MOST_SHOWN = 200
# Of an option that asks for nothing, or gives way to others.
_NOT_IN_USE = (None, False, "auto", "off")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a dataclass.

    Attributes:
        unset: In words, what None means where it is the default.
        least, above, most: Bounds of a number; it is greater than ``above``.
        also: Values beyond these bounds.
        choices: All values, in place of bounds.
        valid: Whether a value is accepted, in place of bounds; ``accepted`` says it in words.
        accepted: Values in words; ``""`` for those of bounds and choices.
        note: Said after them.
        needs: Other option -> its values that go with this one in use; :data:`GIVEN` is any but
            None. Options that a class lacks do not count, so that two classes may share an entry.
        of_engine: The engine's option that gets this one of ``LLM``, if it has another name.
        flag: On command lines, if not ``--`` and the name.
        flag_help: Of the flag, by the value that it gives, where ``help`` does not fit.
        name, annotation, default, text: Of the field; the text is its docstring.
    """

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
    flag: str = ""
    flag_help: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    name: str = ""
    annotation: Any = None
    default: Any = REQUIRED
    text: str = ""

    @functools.cached_property
    def help(self) -> str:
        """The first sentence about it, as a phrase."""
        first = re.split(r"\.(?:\s|$)", self.text, maxsplit=1)[0]
        return first[:1].lower() + first[1:] if first[1:2].islower() else first

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
        bounds = {"at least": self.least, "above": self.above, "at most": self.most}
        found = " and ".join(f"{word} {n}" for word, n in bounds.items() if n is not None)
        if self.least is not None and self.most is not None:
            found = f"from {self.least} to {self.most}"
        if self.kinds == (int,):
            found = f"an integer {'of ' if found.startswith('at') else ''}{found}".rstrip()
        if self.values:
            found = f"one of {', '.join(map(str, self.values))}"
        found = self.accepted or found
        others = [*self.also, *([None] if self.optional else [])]
        return ", or ".join(map(str, [found, *others])) + self.note if found else ""

    def accepts(self, value: Any) -> bool:
        """Whether a value is of its type and within its bounds."""
        try:
            return (value is None and self.optional) or value in self.also or self._holds(value)
        except TypeError:
            return False

    def _holds(self, value: Any) -> bool:
        if self.valid is not None:
            return self.valid(value)
        if self.values:
            return value in self.values
        if self.kinds not in ((int,), (float,)):
            return True
        if self.kinds == (int,) and (not isinstance(value, int) or isinstance(value, bool)):
            return False
        # So that NaN is refused, too.
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and abs(value) < math.inf
        )


def option(default: Any = REQUIRED, **entry: Any) -> Any:
    """The field of an option; its docstring follows it.

    Args:
        default: Its default, if it need not be given.
        entry: Attributes of :class:`Option`.
    """
    return _field(default, Option(**entry))


def like(cls: type, name: str, **changes: Any) -> Any:
    """A field of ``LLM`` made from the engine's option of that meaning, with ``changes``.

    Args:
        cls: Class of the engine's option.
        name: Of the engine's option, whose docstring holds unless another one follows.
        changes: Attributes of :class:`Option` that differ.
    """
    other = options_of(cls)[name]
    default = changes.pop("default", other.default)
    return _field(default, dataclasses.replace(other, of_engine=name, **changes))


def _field(default: Any, entry: Option) -> Any:
    metadata = {_KEY: entry}
    given: dict[str, Any] = {} if default is REQUIRED else {"default": default}
    if isinstance(default, Mapping):
        given = {"default_factory": functools.partial(dict, default)}
    return dataclasses.field(**given, metadata=metadata)


@functools.cache
def options_of(cls: type) -> Mapping[str, Option]:
    """Options of a dataclass by name, its own before those of its bases."""
    hints, texts = typing.get_type_hints(cls), {}
    for owner in reversed(cls.__mro__[:-1]):
        texts |= _docstrings(owner.__module__).get(owner.__name__, {})
    fields = {field.name: field for field in dataclasses.fields(cls) if _KEY in field.metadata}
    order = [name for owner in cls.__mro__ for name in inspect.get_annotations(owner)]
    found = {}
    for name in dict.fromkeys(name for name in order if name in fields):
        field = fields[name]
        default = REQUIRED if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        known = {"name": name, "annotation": hints[name], "default": default}
        known |= {"text": texts[name]} if name in texts else {}
        found[name] = dataclasses.replace(field.metadata[_KEY], **known)
    return types.MappingProxyType(found)


@functools.cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Docstrings of fields, each behind its field, by class and name; none without a source."""
    found: dict[str, dict[str, str]] = {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return found
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        texts = found.setdefault(cls.name, {})
        for field, after in zip(cls.body, cls.body[1:]):
            match field, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.split())
    return found


def documented(cls: _Class) -> _Class:
    """Adds the docstrings of all its options to a class's, as ``Attributes``."""
    lines = [(cls.__doc__ or "").rstrip(), "", "    Attributes:"]
    for name, one in options_of(cls).items():
        lines += textwrap.wrap(
            f"{name}: {one.text}", 100, initial_indent=" " * 8, subsequent_indent=" " * 12
        )
    cls.__doc__ = "\n".join(lines) + "\n"
    return cls


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
                given = repr(value)
                given = given if len(given) <= _MOST_SHOWN else given[:_MOST_SHOWN] + "..."
                raise ValueError(f"{name} must be {one.words}, got {given}")
        for name in needs_in(cls):
            for other in unmet_needs(self, name) if _in_use(self, name) else ():
                needed = needed_words(cls, other, needs_in(cls)[name][other])
                raise ValueError(f"{name} needs {needed}, got {getattr(self, other)!r}")


@functools.cache
def needs_in(cls: type) -> Mapping[str, Mapping[str, tuple]]:
    """What options need of others: name -> the other's name in the class -> values it may have."""
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
