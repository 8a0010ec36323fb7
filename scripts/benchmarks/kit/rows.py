"""A case and its row: dataclasses, whose fields a benchmark declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from benchmarks.kit.report import Times


@dataclass(frozen=True)
class Case:
    """One case; ``str`` gives its name.

    Attributes:
        text: The name, with fields and properties in braces.
        apart: Fields in which cases differ that are compared with each other.
    """

    text: ClassVar[str]
    apart: ClassVar[tuple[str, ...]] = ("implementation",)

    def __str__(self) -> str:
        return self.text.format_map(_Attributes(self))

    @property
    def input(self) -> tuple:
        """What cases that are compared have in common."""
        return tuple(value for name, value in vars(self).items() if name not in self.apart)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or why there are no figures of it.

    Attributes:
        case: What was measured; a benchmark's row names its type.
        error: Empty, or why figures are missing.
    """

    case: Any
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class TimedRow(Row):
    """A row of one call.

    Attributes:
        times: Of one call; None if it was not measured.
        more: Other figures by name; that of ``flops`` makes a rate.
    """

    times: Times | None = None
    more: dict = field(default_factory=dict)


class _Attributes(Mapping):
    """The attributes of an object, for ``str.format_map``."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getitem__(self, name: str) -> Any:
        return getattr(self._of, name)

    def __iter__(self) -> Any:
        return iter(vars(self._of))

    def __len__(self) -> int:
        return len(vars(self._of))
