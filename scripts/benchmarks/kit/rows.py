"""A case and its row: dataclasses, whose fields a benchmark declares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from benchmarks.kit.report import Times


@dataclass(frozen=True)
class Case:
    """One case; ``str`` gives its name."""

    # The name, formatted with the case as argument 0.
    text: ClassVar[str]

    def __str__(self) -> str:
        return self.text.format(self)

    @property
    def input(self) -> tuple:
        """What cases that are compared have in common: all but the implementation."""
        return tuple(value for name, value in vars(self).items() if name != "implementation")

    @property
    def plotted_as(self) -> str:
        """Name of its line in a plot."""
        return vars(self)["implementation"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or why there are no figures of it."""

    case: Any  # what was measured, of the type that the report names
    error: str = ""  # empty, or why figures are missing


@dataclass(frozen=True, kw_only=True)
class TimedRow(Row):
    """A row of one call."""

    times: Times | None = None  # of one call; None if it was not measured
    more: dict = field(default_factory=dict)  # other figures by name; that of flops makes a rate
