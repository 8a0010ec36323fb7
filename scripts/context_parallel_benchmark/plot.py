"""Time and traffic over the length of the sequence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmark_report import can_plot, figure
from context_parallel_benchmark.report import Report, tokens_text
from context_parallel_benchmark.row import Row


def plot(reports: Sequence[Report], path: Path) -> bool:
    """Step time and bytes per token over S, one line of axes for each CP, layout and head count.

    Returns:
        False if there is nothing to draw, or matplotlib is missing.
    """
    panels = _panels(reports)
    if not panels or not can_plot():
        return False
    names = sorted({_series(row) for rows in panels.values() for row in rows})
    with figure(path, len(panels), 2, (11, 0.6 + 3.2 * len(panels))) as grid:
        for (time, traffic), (title, rows) in zip(grid, panels.items()):
            _draw(time, traffic, rows, names)
            _decorate(time, rows, title, "forward and backward [ms]")
            _decorate(traffic, rows, title, "bytes sent per token and rank")
    return True


def _panels(reports: Sequence[Report]) -> dict[str, list[Row]]:
    """What was measured, by the title of its axes."""
    panels: dict[str, list[Row]] = defaultdict(list)
    for report in reports:
        for row in report.rows:
            if not row.error:
                case = row.case
                title = f"{row.cp_size} ranks, {case.layout}, {case.heads} heads"
                panels[title].append(row)
    return panels


def _series(row: Row) -> str:
    case = row.case
    recompute = "" if case.recompute == "none" else ", recompute"
    return f"{case.implementation}, {case.cp_comm_type}, {case.form}{recompute}"


def _draw(time, traffic, rows: list[Row], names: list[str]) -> None:
    """One line of axes; ``names`` are those of all lines of axes, each in a colour of its own."""
    for number, name in enumerate(names):
        own = sorted((r for r in rows if _series(r) == name), key=lambda r: r.case.tokens)
        if own:
            # What is drawn first is wider: equal lines stay visible.
            style = {"color": f"C{number}", "linewidth": 1.2 + 1.5 * (len(names) - 1 - number)}
            _draw_series(time, traffic, own, name, style)
    traffic.plot([], [], "k-", label="forward")
    traffic.plot([], [], "k--", label="backward")
    traffic.legend(fontsize=8)
    time.legend(fontsize=8)


def _draw_series(time, traffic, rows: list[Row], name: str, style: dict) -> None:
    sizes = [row.case.tokens for row in rows]
    middles = [1e3 * median(row.step_seconds) for row in rows]
    least, most = ([1e3 * f(row.step_seconds) for row in rows] for f in (min, max))
    errors = [
        [m - low for m, low in zip(middles, least)],
        [high - m for m, high in zip(middles, most)],
    ]
    time.errorbar(sizes, middles, errors, fmt="o-", capsize=3, label=name, **style)
    traffic.plot(sizes, [row.forward_bytes_per_token for row in rows], "o-", **style)
    traffic.plot(sizes, [row.backward_bytes_per_token for row in rows], "s--", **style)


def _decorate(axes, rows: list[Row], title: str, label: str) -> None:
    from matplotlib.ticker import LogLocator

    sizes = sorted({row.case.tokens for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [tokens_text(size) for size in sizes])
    axes.set_xticks([], minor=True)
    for plain in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        plain("{x:,.0f}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("tokens of the whole sequence")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
