"""Rates over the batch, one picture for each number of heads and of keys."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from benchmark_report import can_plot, figure
from decode_benchmark.report import Report

# Enough to be read.
_MOST_PANELS = 16


def plot(report: Report, path: Path) -> bool:
    """Draw TB/s of latents and TFLOP/s with the ceilings, for one new token in the first blocks.

    Returns:
        False if there is nothing to draw, or matplotlib is missing.
    """
    panels: dict = defaultdict(lambda: defaultdict(list))
    for row in report.measured:
        case, rates = row.case, report.rates(row)
        alike = f"n={case.heads} kv={case.keys} s_q={case.query_length} block={case.block_size}"
        for rate, unit in zip(rates, ("TFLOP/s", "TB/s")):
            panels[f"{alike} [{unit}]"][case.implementation].append((case.batch, rate))
    if not panels or not can_plot():
        return False
    shown = list(panels.items())[:_MOST_PANELS]
    ceilings = report.environment["ceilings"]
    rows = -(-len(shown) // 2)
    with figure(path, rows, 2, (11, 0.6 + 3.2 * rows)) as grid:
        for axes in grid.flat[len(shown) :]:
            axes.set_axis_off()
        for axes, (title, lines) in zip(grid.flat, shown):
            for name, points in lines.items():
                axes.plot(*zip(*sorted(points)), marker="o", label=name)
            limit = "copy_tbps" if "TB/s" in title else "matmul_tflops"
            axes.axhline(ceilings[limit], color="grey", linestyle=":", label=limit)
            batches = sorted({batch for points in lines.values() for batch, _ in points})
            axes.set(title=title, xlabel="batch", xscale="log", ylim=(0, None))
            axes.set_xticks(batches, [str(batch) for batch in batches])
            axes.minorticks_off()
            axes.legend(fontsize=7)
    return True
