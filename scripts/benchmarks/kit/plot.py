"""The plot of all benchmarks: panels of lines."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kit.tables import tokens_text
from console.figure import figure

# More panels would be too small to read.
MOST_PANELS = 16
# A legend of more would cover them.
MOST_LINES = 6
Points = list[tuple[float, float]]


@dataclass
class Panel:
    """One pair of axes."""

    title: str  # above it
    xlabel: str  # below it; x is a size, drawn by powers of 2
    # By name, points (x, y).
    lines: dict[str, Points] = field(default_factory=lambda: defaultdict(list))


def collected(points: Iterable[tuple[str, str, float, float]], xlabel: str) -> list[Panel]:
    """Panels of points (title of the panel, name of the line, x, y)."""
    panels: dict[str, Panel] = {}
    for title, name, x, y in points:
        panel = panels.setdefault(title, Panel(title, xlabel))
        panel.lines[name].append((x, y))
    return list(panels.values())


def draw(panels: Sequence[Panel], path: Path) -> bool:
    """Draw into a PNG.

    Returns:
        False if there is nothing to draw, or matplotlib is missing.
    """
    shown = [panel for panel in panels if panel.lines][:MOST_PANELS]
    if not shown or importlib.util.find_spec("matplotlib") is None:
        return False
    rows = -(-len(shown) // 2)
    with figure(path, rows, 2, (11, 0.6 + 3.2 * rows)) as grid:
        for axes in grid.flat[len(shown) :]:
            axes.set_axis_off()
        for axes, panel in zip(grid.flat, shown):
            _draw(axes, panel)
    return True


def _draw(axes, panel: Panel) -> None:
    for number, (name, points) in enumerate(panel.lines.items()):
        # Lines drawn first are wider, so that equal ones stay visible.
        width = 1.2 + min(0.8, 4 / len(panel.lines)) * (len(panel.lines) - 1 - number)
        xs, ys = zip(*sorted(points))
        axes.plot(xs, ys, marker="o", markersize=4, linewidth=width, label=name)
    sizes = sorted({x for points in panel.lines.values() for x, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [tokens_text(int(size)) for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0, top=1.05 * axes.get_ylim()[1])
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.xlabel)
    axes.grid(alpha=0.3)
    many = len(panel.lines) > MOST_LINES
    axes.legend(fontsize=7, **({"loc": "upper left", "bbox_to_anchor": (1, 1)} if many else {}))
