"""The table of docs/measurements/serving.md with the time of drawing tokens."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kit.report import Times
from benchmarks.kit.tables import markdown_table
from checks.performance.row import recorded

_NONE = "Not measured yet."
# Sampling parameters of each kind of drawing in the file.
_DRAWS = {
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
    "both": {"top_k": 20, "top_p": 0.8, "temperature": 0.6},
}


def table(docs: Path) -> str:
    """Microseconds of our kernels and of PyTorch's functions, a kind of drawing in a line."""
    file = docs / "generation" / "drawing.json"
    if not file.exists():
        return _NONE
    found = {tuple(vars(row.case).values()): row for row in recorded(file)}
    counts = sorted({requests for _, _, requests in found})
    lines = []
    for draws, logits in dict.fromkeys((draws, logits) for draws, logits, _ in found):
        measured = [found.get((draws, logits, count)) for count in counts]
        cells = [_cell(getattr(one, name, None)) for one in measured for name in ("ours", "torch")]
        lines.append([_described(draws), logits, *cells])
    head = [f"{count}: {name} us" for count in counts for name in ("ours", "PyTorch")]
    return markdown_table(["drawn", "logits", *head], lines, ["drawn", "logits"])


def _described(draws: str) -> str:
    filters = (f"`{name}` {value}" for name, value in _DRAWS.get(draws, {}).items())
    return ", ".join(filters) or draws


def _cell(times: Times | None) -> str:
    return f"{1e6 * times.median:.1f}" if times else "-"
