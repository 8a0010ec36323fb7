"""The table of docs/measurements/serving.md with the time of drawing tokens."""

from __future__ import annotations

from pathlib import Path

from benchmarks.drawing import DRAWS, DrawingCase, DrawingReport
from benchmarks.kit.tables import markdown_table

_NONE = "Not measured yet."


def table(docs: Path) -> str:
    """Microseconds of our kernels and of PyTorch's functions, a kind of drawing in a line."""
    file = docs / "generation" / "drawing.json"
    if not file.exists():
        return _NONE
    report = DrawingReport.read(file)
    found = {row.case: report.figures(row) for row in report.measured}
    counts = sorted({case.requests for case in found})
    kinds = dict.fromkeys((case.draws, case.logits) for case in found)
    lines = []
    for draws, logits in kinds:
        figures = [found.get(DrawingCase(draws, logits, count), {}) for count in counts]
        cells = [_cell(one, name) for one in figures for name in ("ours_us", "torch_us")]
        lines.append([_described(draws), logits, *cells])
    head = [f"{count}: {name} us" for count in counts for name in ("ours", "PyTorch")]
    return markdown_table(["drawn", "logits", *head], lines, ["drawn", "logits"])


def _described(draws: str) -> str:
    filters = ", ".join(f"`{name}` {value}" for name, value in DRAWS[draws].items())
    return draws if draws in ("greedy", "sampled") else filters


def _cell(figures: dict[str, float], name: str) -> str:
    return f"{figures[name]:.1f}" if name in figures else "-"
