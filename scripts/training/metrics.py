"""Metrics of a run: a file of JSON lines, and a plot of the losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from console.figure import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The axis of differences is logarithmic above this and linear below it, so that it can show 0.
_SMALLEST_DIFFERENCE = 1e-8


def read_metrics(path: str | Path) -> list[dict]:
    """Records of a metrics file. An incomplete last line, of a run that was killed, is left out.

    Raises:
        ValueError: If another line is not a record.
    """
    records = []
    lines = Path(path).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("iteration"), int):
            records.append(record)
        elif number < len(lines):
            raise ValueError(f"{path}, line {number} is no metrics record: {line[:80]!r}")
    return records


class MetricsFile:
    """Appends records to a file, one JSON object per line, flushed at once.

    Args:
        path: The file; None keeps the records in memory only.
        resumed_at: Number of iterations already done. Records of later iterations are deleted,
            because these run again.
    """

    def __init__(self, path: str | None, resumed_at: int) -> None:
        self.records: list[dict] = []
        self._file = None
        if path is None:
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if resumed_at and target.exists():
            self.records = [r for r in read_metrics(target) if r["iteration"] <= resumed_at]
        rewritten = target.with_name(f".{target.name}")
        rewritten.write_text("".join(json.dumps(r) + "\n" for r in self.records))
        rewritten.replace(target)
        self._file = target.open("a")

    def write(self, **record: float) -> None:
        """Append a record; its ``iteration`` is the number of iterations done."""
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def series(records: list[dict], key: str) -> dict[int, float]:
    """The values of ``key``, by iteration."""
    return {r["iteration"]: r[key] for r in records if key in r}


def plot_losses(
    runs: dict[str, list[dict]], path: str | Path, *, title: str = "Loss during training"
) -> None:
    """Draw training and validation losses of one or more runs, and the difference of two.

    Args:
        runs: Records of each run, by its name in the legend.
        path: PNG to write.
        title: Title of the plot.
    """
    heights = (5,) if len(runs) != 2 else (4.7, 2.3)
    size = (8, sum(heights))
    with figure(path, len(heights), 1, size, sharex=True, height_ratios=heights) as grid:
        losses, *differences = grid.flat
        _draw_losses(losses, runs)
        losses.set_title(title)
        for axes in differences:
            _draw_differences(axes, runs)
        for axes in grid.flat:
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()
        grid.flat[-1].set_xlabel("iteration")


def _draw_losses(axes: Axes, runs: dict[str, list[dict]]) -> None:
    for number, (name, records) in enumerate(runs.items()):
        train, valid = series(records, "train_loss"), series(records, "valid_loss")
        color = f"C{number}"
        # The second run is drawn thin over the first, so that both of two equal curves are seen.
        first = number == 0
        width = 3.0 if first else 1.0
        axes.plot(list(train), list(train.values()), color=color, linewidth=width, label=name)
        if valid:
            style, size = ("o--", 9) if first else ("x:", 6)
            label = f"{name}, validation"
            x, y = list(valid), list(valid.values())
            axes.plot(x, y, style, color=color, markersize=size, label=label)
    axes.set_ylabel("loss per token (nats)")


def _draw_differences(axes: Axes, runs: dict[str, list[dict]]) -> None:
    left, right = runs.values()
    for key, label, style in (("train_loss", "training", "-"), ("valid_loss", "validation", "o--")):
        difference = absolute_differences(left, right, key)
        if difference:
            axes.plot(list(difference), list(difference.values()), style, color="C2", label=label)
    axes.set_yscale("symlog", linthresh=_SMALLEST_DIFFERENCE)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("|difference| (nats)")
    axes.set_title("Difference of the two runs", fontsize="medium")


def absolute_differences(left: list[dict], right: list[dict], key: str) -> dict[int, float]:
    """Absolute difference of ``key`` for each iteration that both runs have."""
    first, second = series(left, key), series(right, key)
    return {i: abs(second[i] - first[i]) for i in sorted(first.keys() & second.keys())}
