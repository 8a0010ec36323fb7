"""Results of a benchmark: rows with figures, and the JSON file that holds them."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Self, TypeVar, get_args, get_type_hints

from benchmarks.kit import provenance
from benchmarks.kit.plot import Panel, collected
from benchmarks.kit.tables import shortened

_Built = TypeVar("_Built")


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


def measured_fields(row: Any) -> dict[str, float]:
    """What a row has measured, by field; those that are None are left out."""
    fields = {k: v for k, v in asdict(row).items() if k not in ("case", "error")}
    return {name: value for name, value in fields.items() if value is not None}


@dataclass
class Report:
    """One run of a benchmark.

    A benchmark's own report names the type of its rows, dataclasses with fields ``case`` and
    ``error`` (empty, or why figures are missing), and derives their figures.
    """

    environment: dict  # from provenance.describe
    rows: list = field(default_factory=list)  # in the order they were measured

    row: ClassVar[type]  # type of the rows
    rows_key: ClassVar[str] = "rows"  # name of the rows in the JSON file
    environment_key: ClassVar[str] = "environment"  # name of the environment in the JSON file
    # Whether the rates that the devices reach are printed after the rows.
    shows_ceilings: ClassVar[bool] = False

    @classmethod
    def of(cls, row: type) -> type[Self]:
        """The same, of rows of this type."""
        return type(f"{row.__name__}Report", (cls,), {"row": row, "__doc__": cls.__doc__})

    def figures(self, row: Any) -> dict[str, float]:
        """Rates, ratios, milliseconds and so on of a row without an error, by name."""
        return measured_fields(row)

    def as_json(self, row: Any) -> dict:
        """A row in the file; values beyond its fields are ignored when it is read."""
        return asdict(row)

    @property
    def measured(self) -> list:
        """Rows with figures."""
        return [row for row in self.rows if not row.error]

    def write(self, path: Path) -> None:
        """As JSON."""
        rows = [self.as_json(row) for row in self.rows]
        write_json(path, {self.environment_key: self.environment, self.rows_key: rows})

    @classmethod
    def read(cls, path: Path) -> Self:
        """The inverse of :meth:`write`.

        Raises:
            ValueError: If the file is not one of this script's.
        """

        def build(content: dict) -> Self:
            rows = [read_dataclass(cls.row_type(one), one) for one in content[cls.rows_key]]
            return cls(content[cls.environment_key], rows)

        return read_json(path, build)

    @classmethod
    def row_type(cls, content: dict) -> type:
        """Type of a row in the file."""
        return cls.row

    @classmethod
    def panels(cls, reports: Sequence[Self]) -> list[Panel]:
        """Of the plot of these reports."""
        return []

    @classmethod
    def over(
        cls,
        reports: Sequence[Self],
        title: str,
        figure: str,
        x: str,
        xlabel: str,
        wanted: Callable[[Any], bool] = lambda case: True,
        **options: Any,
    ) -> list[Panel]:
        """Panels of one figure over a field of the cases, a line for each implementation.

        Args:
            reports: Whose measured rows are drawn.
            title: Of the panel of a case, which is argument 0 of ``str.format``.
            figure: Name of it.
            x: Name of the field.
            xlabel: What it is.
            wanted: Whether a case is drawn.
            options: Of each panel.
        """
        points = [
            (title.format(row.case), row.case.implementation, getattr(row.case, x), found[figure])
            for report in reports
            for row in report.measured
            if wanted(row.case)
            for found in [report.figures(row)]
        ]
        return collected(points, xlabel, **options)

    @classmethod
    def notes(cls, reports: Sequence[Self]) -> list[str]:
        """Paragraphs to print after the rows; empty ones are left out."""
        if not cls.shows_ceilings:
            return []
        return [provenance.ceilings_reached(report.environment) for report in reports]

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
        return {self.environment_key: self.environment, self.rows_key: rows}


def write_json(path: Path, content: Any) -> None:
    """Write a file; an interruption leaves the whole file or the former one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def read_json(path: Path, build: Callable[[Any], _Built]) -> _Built:
    """A file that was given by ``--render``, as ``build`` makes an object of its content.

    Raises:
        ValueError: If ``build`` cannot read it.
    """
    try:
        return build(json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"--render must be JSON that this script wrote; {path}: {error!r}"
        ) from None


def read_dataclass(kind: type, content: dict) -> Any:
    """A dataclass from JSON, the inverse of ``asdict``.

    Missing fields take their defaults; unknown ones are ignored.
    """
    hints = get_type_hints(kind)
    known = {one.name: one for one in fields(kind) if one.name in content}
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
    """The cases without figures, by reason; empty if there are none.

    Args:
        reports: Of one benchmark.
        most: Cases that are named for one reason.
    """
    by_reason: dict[str, list[str]] = defaultdict(list)
    for report in reports:
        for row in report.rows:
            if row.error:
                by_reason[shortened(row.error)].append(str(row.case))
    lines = []
    for why, names in by_reason.items():
        more = f"; {len(names) - most} more" if len(names) > most else ""
        lines.append(f"- {why}: {'; '.join(names[:most])}{more}")
    return "\n".join(["Not measured:", "", *lines]) if lines else ""


class ComparedReport(Report):
    """A report whose rows of ``"ours"`` are compared with Megatron's on the same input.

    Rows have a property ``compared``, which is equal for rows that may be compared.
    """

    def quantities(self, row: Any) -> dict[str, float | None]:
        """What is divided by the peer's, by name; None where it is unknown."""
        raise NotImplementedError

    def peer(self, row: Any) -> Any:
        """Megatron's row to compare with, None if it was not measured."""
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
        return {
            name: own / theirs[name]
            for name, own in self.quantities(row).items()
            if own and theirs[name]
        }
