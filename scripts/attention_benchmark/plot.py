"""Both suites over the length of the sequence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from attention_benchmark.cases import CoreCase, LayerCase
from attention_benchmark.report import KEPT_TARGET, TIME_TARGET, Report
from benchmark_report import can_plot, figure
from context_parallel_benchmark.report import tokens_text

# Title of the axes -> name of the line -> (tokens, value).
Panels = dict[str, dict[str, list[tuple[int, float]]]]


def plot(reports: Sequence[Report], path: Path) -> bool:
    """Draw ratios of ours to Megatron's layer, and TFLOP/s of attention alone.

    Returns:
        False if there is nothing to draw, or matplotlib is missing.
    """
    panels = {**_layer_panels(reports), **_core_panels(reports)}
    if not panels or not can_plot():
        return False
    rows = -(-len(panels) // 2)
    with figure(path, rows, 2, (11, 0.6 + 3.2 * rows)) as grid:
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes, (title, lines) in zip(grid.flat, panels.items()):
            _draw(axes, title, lines)
    return True


def _layer_panels(reports: Sequence[Report]) -> Panels:
    panels: Panels = defaultdict(lambda: defaultdict(list))
    for report in reports:
        for row in report.measured("layer"):
            case = row.case
            assert isinstance(case, LayerCase)
            # Only ours has ratios: Megatron's are what they are of.
            name = "both layers recompute" if case.recompute else "neither recomputes"
            for what, ratio in report.ratios(row).items():
                if what != "forward":
                    title = f"{what} of megatron's, {case.layout}, {case.heads} heads"
                    panels[title][name].append((case.tokens, ratio))
    return dict(sorted(panels.items()))


def _core_panels(reports: Sequence[Report]) -> Panels:
    panels: Panels = defaultdict(lambda: defaultdict(list))
    for report in reports:
        for row in report.measured("core"):
            case = row.case
            assert isinstance(case, CoreCase)
            for what, tflops in report.tflops(row).items():
                if what != "step":
                    title = f"{case.form}, {what}, {case.heads} heads [TFLOP/s]"
                    panels[title][case.implementation].append((case.tokens, tflops))
    return dict(sorted(panels.items()))


def _draw(axes, title: str, lines: dict[str, list[tuple[int, float]]]) -> None:
    sizes = sorted({tokens for points in lines.values() for tokens, _ in points})
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points)), "o-", markersize=4, label=name)
    for word, target in (("step", TIME_TARGET), ("kept", KEPT_TARGET)):
        if title.startswith(word):
            axes.axhline(target, color="black", linestyle=":", label=f"target {target:g}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [tokens_text(size) for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0, top=1.05 * axes.get_ylim()[1])
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("tokens")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
