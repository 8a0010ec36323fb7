"""Typed fields of an untrusted dictionary: config.json, or the arguments in a checkpoint.

Everything that is wrong is collected, so that one run finds all problems.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from checkpoint_conversion.errors import raise_problems

# Bounds far above any model, so that a broken file cannot fill the memory with names.
MOST_LAYERS, MOST_HEADS, MOST_MTP_LAYERS = 2**12, 2**14, 64
MOST_WIDTH, MOST_VOCABULARY, MOST_POSITIONS = 2**20, 2**24, 2**31
MOST_EXPERTS, MOST_EXPERTS_OF_ALL_LAYERS = 2**16, 2**18
MOST = 1e12


class _Shown(reprlib.Repr):
    """A bounded ``repr``; Python refuses to print integers of thousands of digits."""

    def repr_int(self, x: int, level: int) -> str:
        """The integer, or its length in bits if it is large."""
        return str(x) if x.bit_length() <= 64 else f"<integer of {x.bit_length()} bits>"


_SHOWN = _Shown()


def shown(value: object) -> str:
    """A value as error messages show it, in one short line."""
    return " ".join(_SHOWN.repr(value).split())


def dtype_name(dtype: object) -> str:
    """The name of a ``torch.dtype`` without its module, e.g. ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def _is_number(value: Any, least: float, most: float) -> bool:
    # Not a number compares as false.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and least <= value <= most


class Fields:
    """Reads typed fields of a dictionary.

    A field that is null counts as missing. A wrong value is recorded as a problem and replaced by
    an acceptable one, so that one run finds all problems.

    Args:
        values: The dictionary.
        problems: Receives one line per problem.
        prefix: Precedes every field name in messages.
        names: Names that the dictionary has for fields, where they differ from those asked for.
        aliases: Further names, which it may have in their place.
        defaults: Values of missing fields, before those of the methods.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        problems: list[str],
        prefix: str = "",
        *,
        names: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._values = values
        self.problems = problems
        self._prefix = prefix
        self._names, self._aliases = names or {}, aliases or {}
        self._defaults = defaults or {}
        for own, alias in self._aliases.items():
            both = values.get(self._names.get(own, own)), values.get(alias)
            if None not in both and both[0] != both[1]:
                self.wrong(own, f"the same as {alias}, {shown(both[1])}")

    def name(self, name: str) -> str:
        """What the dictionary calls a field."""
        own, alias = self._names.get(name, name), self._aliases.get(name)
        return alias if alias in self._values and own not in self._values else own

    def names(self) -> list[str]:
        """Of all fields, as the dictionary has them."""
        return list(map(str, self._values))

    def raw(self, name: str) -> object:
        """The value as it is; None if there is none."""
        return self._values.get(self.name(name))

    def given(self, name: str) -> bool:
        """Whether there is a value that is not null."""
        return self.raw(name) is not None

    def null(self, name: str) -> bool:
        """Whether the field is there and null."""
        return self.name(name) in self._values and self.raw(name) is None

    def equals(self, name: str, expected: object) -> bool:
        """Whether the value is a bool, number or string and equal to ``expected``."""
        value = self.raw(name)
        return isinstance(value, bool | int | float | str) and value == expected

    def wrong(self, name: str, accepted: str) -> None:
        """Record that a field is missing or has a value that is not accepted."""
        field = self._prefix + self.name(name)
        if self.given(name):
            problem = f"{field} must be {accepted}, got {shown(self.raw(name))}"
        else:
            problem = f"{field} is missing; it must be {accepted}"
        if problem not in self.problems:
            self.problems.append(problem)

    def only(self, name: str, value: object, accepted: str | None = None) -> None:
        """Record a field that is there with another value than ``value``; None: any value.

        Args:
            name: Of the field.
            value: 0 does not equal False.
            accepted: What it must be, as an error says it; None: the value.
        """
        boolean = isinstance(self.raw(name), bool) == isinstance(value, bool)
        if self.given(name) and not (boolean and self.equals(name, value)):
            self.wrong(name, accepted or shown(value))

    def at(self, path: str) -> tuple[Fields | None, str]:
        """The fields that a path such as ``"rope_scaling.factor"`` leads into, and the last name.

        None if a section on the way is missing.
        """
        fields: Fields | None = self
        *sections, name = path.split(".")
        for section in sections:
            fields = fields and fields.section(section)
        return fields, name

    def _default(self, name: str, default: Any) -> Any:
        """The value of a field that is not given; None if it must be."""
        return None if self.given(name) else self._defaults.get(name, default)

    def raise_problems(self, summary: str) -> None:
        """Raise an error if any problem was recorded."""
        raise_problems(summary, self.problems)

    def integer(self, name: str, most: int, *, least: int = 1, default: int | None = None) -> int:
        """An integer from ``least`` to ``most``; without a default it must be there."""
        if (default := self._default(name, default)) is not None:
            return default
        return self._integer(name, least, most, f"an integer from {least} to {most}")

    def integer_or_null(self, name: str, most: int, *, least: int = 1) -> int | None:
        """An integer from ``least`` to ``most`` or, if it is null or missing by default, None."""
        if self.null(name):
            return None
        if not self.given(name) and name in self._defaults:
            return self._defaults[name]
        return self._integer(name, least, most, f"null or an integer from {least} to {most}")

    def _integer(self, name: str, least: int, most: int, accepted: str) -> int:
        value = self.raw(name)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        self.wrong(name, accepted)
        return least

    def number(
        self, name: str, least: float, most: float, *, default: float | None = None
    ) -> float:
        """A number from ``least`` to ``most``; without a default it must be there."""
        if (default := self._default(name, default)) is not None:
            return default
        value = self.raw(name)
        if _is_number(value, least, most):
            return value
        self.wrong(name, f"a number from {least:g} to {most:g}")
        return least

    def numbers(self, name: str, count: int, least: float, most: float) -> tuple[float, ...]:
        """``count`` numbers from ``least`` to ``most``, which must be there."""
        value = self.raw(name)
        listed = isinstance(value, list | tuple) and len(value) == count
        if listed and all(_is_number(one, least, most) for one in value):
            return tuple(map(float, value))
        self.wrong(name, f"a list of {count} numbers from {least:g} to {most:g}")
        return (1.0,)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        if not self.given(name):
            return self._default(name, default)
        value = self.raw(name)
        if isinstance(value, bool):
            return value
        self.wrong(name, "true or false")
        return default

    def choice(self, name: str, accepted: Sequence[str], default: str | None = None) -> str:
        """One of some strings; without a default it must be there."""
        if (default := self._default(name, default)) is not None:
            return default
        value = self.raw(name)
        if isinstance(value, str) and value in accepted:
            return value
        self.wrong(name, " or ".join(map(repr, accepted)))
        return accepted[0]

    def section(self, name: str) -> Fields | None:
        """The fields of a dictionary inside, or None if there is none."""
        if not self.given(name):
            return None
        value = self.raw(name)
        if not isinstance(value, dict):
            self.wrong(name, "an object")
            return None
        return Fields(value, self.problems, f"{self._prefix}{name}.")
