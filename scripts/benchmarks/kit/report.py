"""Results of a benchmark: rows with figures, and the JSON file that holds them."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Self, get_args, get_type_hints

from benchmarks.kit import provenance
from benchmarks.kit.plot import Panel, collected
from benchmarks.kit.tables import shortened


@dataclass(frozen=True)
class Times:
    """Seconds of the repetitions: the median, the shortest, the longest, and their number."""

    median: float
    least: float
    most: float
    repetitions: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Of at least one repetition."""
        return cls(median(seconds), min(seconds), max(seconds), len(seconds))


class Refused(Exception):
    """A case that an implementation does not support, with its reason."""


@contextlib.contextmanager
def refusing(kind: type[Exception]) -> Iterator[None]:
    """Make errors of a kind refusals, whose message is the reason."""
    try:
        yield
    except kind as error:
        raise Refused(str(error)) from None


def reason(error: BaseException) -> str:
    """Why a case has no figures, for its row.

    Text, because a traceback would keep tensors alive that memory is short of.
    """
    text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    return shortened(text, 1000)


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


@dataclass(frozen=True, kw_only=True)
class RanRow(TimedRow):
    """A row of what chooses how it computes."""

    ran: str = ""  # backends, of layers their forms, too


@dataclass
class Report:
    """One run of a benchmark; its own report names the type of its rows, and derives figures."""

    environment: dict  # from provenance.describe
    rows: list = field(default_factory=list)  # in the order they were measured

    row: ClassVar[type]  # dataclass of the rows, with fields case and error
    case: ClassVar[Any] = Any  # dataclass of their cases, or a union of some
    # Panels of the plot: its title, formatted with a case and its row; the figure; and the field
    # that it is drawn over, a line for each implementation.
    plotted: ClassVar[tuple[tuple[str, str, str], ...]] = ()

    def figures(self, row: Any) -> dict[str, float]:
        """Rates, ratios, milliseconds and so on of a row without an error, by name."""
        return row.more

    @property
    def measured(self) -> list:
        """Rows with figures."""
        return [row for row in self.rows if not row.error]

    def quantities(self, row: Any) -> dict[str, float | None]:
        """What is divided by Megatron's, by name; None where it is unknown."""
        raise NotImplementedError

    def peer(self, row: Any) -> Any:
        """Megatron's row with an equal ``compared``; None if it was not measured."""
        for other in self.measured:
            if other.case.implementation == "megatron" and other.compared == row.compared:
                return other
        return None

    def ratios(self, row: Any) -> dict[str, float]:
        """Every quantity divided by the peer's; empty without a peer, and for the peer itself."""
        peer = self.peer(row)
        if peer is None or peer is row:
            return {}
        theirs = self.quantities(peer)
        found = self.quantities(row).items()
        return {name: own / theirs[name] for name, own in found if own and theirs[name]}

    def write(self, path: Path) -> None:
        """As JSON."""
        rows = list(map(asdict, self.rows))
        write_json(path, {"environment": self.environment, "rows": rows})

    @classmethod
    def read(cls, path: Path) -> Self:
        """The inverse of :meth:`write`.

        Raises:
            ValueError: If the file is not one of this script's.
        """
        try:
            content = json.loads(path.read_text())
            rows = [read_dataclass(cls.row, one, case=cls.case) for one in content["rows"]]
            return cls(content["environment"], rows)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"--render must be JSON that this script wrote; {path}: {error!r}"
            ) from None

    @classmethod
    def panels(cls, reports: Sequence[Self]) -> list[Panel]:
        """Of the plot of these reports."""
        found = [(row, one.figures(row)) for one in reports for row in one.measured]
        panels = []
        for title, figure, x in cls.plotted:
            points = [
                (title.format(row.case, row), row.case.plotted_as, getattr(row.case, x), y[figure])
                for row, y in found
                if figure in y
            ]
            panels += collected(sorted(points), x)
        return panels

    @classmethod
    def notes(cls, reports: Sequence[Self]) -> list[str]:
        """Paragraphs to print after the rows, of the rates that the devices reach; some empty."""
        measured = (one.environment for one in reports if "ceilings" in one.environment)
        return [provenance.ceilings_reached(about) for about in measured]

    def line(self, row: Any) -> str:
        """A row in one line."""
        if row.error:
            return f"{row.case}: {shortened(row.error, 150)}"
        ran = f" ({row.ran})" if getattr(row, "ran", "") else ""
        figures = (f"{name} {value:.4g}" for name, value in self.figures(row).items())
        return f"{row.case}{ran}: {', '.join(figures)}"

    def summary(self) -> dict:
        """Environment, and the figures of every row or why it has none."""
        rows = []
        for row in self.rows:
            case = asdict(row.case) if is_dataclass(row.case) else {"case": row.case}
            rows.append(case | ({"error": row.error} if row.error else self.figures(row)))
        return {"environment": self.environment, "rows": rows}


def write_json(path: Path, content: Any) -> None:
    """Write a file; an interruption leaves the whole file or the former one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def read_dataclass(kind: type, content: dict, **types: Any) -> Any:
    """A dataclass from JSON, the inverse of ``asdict``.

    Missing fields take their defaults; unknown ones are ignored.

    Args:
        kind: The dataclass.
        content: Of the file.
        types: Of fields that ``kind`` does not declare the type of.
    """
    hints = get_type_hints(kind) | types
    known = [one.name for one in fields(kind) if one.name in content]
    return kind(**{name: _value(hints[name], content[name]) for name in known})


def _value(hint: Any, content: Any) -> Any:
    """A value of a type that is, or has among its parts, a dataclass; anything else as it is."""
    kinds = [kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)]
    if not kinds or content is None:
        return content
    if isinstance(content, list):
        return [read_dataclass(kinds[0], one) for one in content]
    for kind in kinds:
        if set(content) <= {one.name for one in fields(kind)}:
            return read_dataclass(kind, content)
    raise ValueError(f"{content} is no {' and no '.join(kind.__name__ for kind in kinds)}")


def not_measured(reports: Iterable[Report], most: int = 4) -> str:
    """The cases without figures, by reason, at most so many of each; empty if there are none."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for row in (row for report in reports for row in report.rows if row.error):
        by_reason[shortened(row.error)].append(str(row.case))
    lines = []
    for why, names in by_reason.items():
        more = f"; {len(names) - most} more" if len(names) > most else ""
        lines.append(f"- {why}: {'; '.join(names[:most])}{more}")
    return "\n".join(["Not measured:", "", *lines]) if lines else ""
