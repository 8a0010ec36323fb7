"""A case and its row: dataclasses, whose fields a benchmark declares."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from string import Formatter
from typing import Any, ClassVar

from benchmarks.kit.report import Times
from benchmarks.kit.tables import tokens_text


@dataclass(frozen=True)
class Case:
    """One case; ``str`` gives its name."""

    # The name, with fields and properties in braces. {heads:? n=%s} is left out where there are
    # none, {graphs:?graphs|eager} says which, {tokens:k} may be "16k".
    text: ClassVar[str]
    # Fields in which cases differ that are compared with each other.
    apart: ClassVar[tuple[str, ...]] = ("implementation",)

    def __str__(self) -> str:
        return _Name().vformat(self.text, (), {"case": self})

    @property
    def input(self) -> tuple:
        """What cases that are compared have in common."""
        return tuple(value for name, value in vars(self).items() if name not in self.apart)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or why there are no figures of it."""

    case: Any  # what was measured; a benchmark's row names its type
    error: str = ""  # empty, or why figures are missing


@dataclass(frozen=True, kw_only=True)
class TimedRow(Row):
    """A row of one call."""

    times: Times | None = None  # of one call; None if it was not measured
    more: dict = field(default_factory=dict)  # other figures by name; that of flops makes a rate


def row_of(case: type, base: type[Row] = Row) -> type:
    """The type of rows that have nothing but a case of this type and what ``base`` has."""
    return make_dataclass("Row", [("case", case)], bases=(base,), frozen=True, kw_only=True)


class _Name(Formatter):
    """Formats the attributes of a case."""

    def get_field(self, name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        return getattr(kwargs["case"], name), name

    def format_field(self, value: Any, spec: str) -> str:
        if spec == "k":
            return tokens_text(value)
        if not spec.startswith("?"):
            return str(value)
        text, _, otherwise = spec[1:].partition("|")
        return text.replace("%s", str(value)) if value else otherwise
