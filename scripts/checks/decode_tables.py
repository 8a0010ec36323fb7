"""Tables of decode over a paged cache from the results under docs/measurements/decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.decode import DecodeReport
from benchmarks.kit.tables import markdown_table, tokens_text
from checks.performance.row import by_input

_OURS, _PEER = "ours, hopper", "FlashMLA"


def equal_table(docs: Path) -> str:
    """Microseconds and rates of requests of 8,192 keys."""
    names = (_OURS, "ours, triton", _PEER)
    report = DecodeReport.read(docs / "decode" / "decode.json")
    lines = []
    for found in _by_input(report):
        case = found[_OURS].case
        if case.kv == 8192 and all(name in found for name in names):
            cells = [_time_and_rate(report, found[name]) for name in names]
            lines.append([str(case.heads), str(case.batch), *cells])
    head = ["heads", "requests", "`hopper`", "`triton`", _PEER]
    return markdown_table(head, sorted(lines, key=lambda line: int(line[0])), [])


def lengths_table(docs: Path) -> str:
    """Microseconds of requests of unequal lengths, and the ratio to FlashMLA's."""
    lines = []
    for name in ("lengths.json", "one-long.json"):
        for found in _by_input(DecodeReport.read(docs / "decode" / name)):
            case = found[_OURS].case
            if case.lengths != "equal":
                ours, peer = (found[one].times.median * 1e6 for one in (_OURS, _PEER))
                lengths = f"{case.lengths.replace('_', ' ')}, up to {tokens_text(case.kv)}"
                sizes = [lengths, str(case.heads), str(case.batch)]
                lines.append([*sizes, f"{ours:.1f}", f"{peer:.1f}", f"{ours / peer:.2f}"])
    return markdown_table(
        ["lengths", "heads", "requests", "us", _PEER, "ratio"], lines, ["lengths"]
    )


def _by_input(report: DecodeReport) -> list[dict[str, Any]]:
    """Rows of the same input, by implementation."""
    return by_input(
        report.measured, lambda row: row.case.input, lambda row: row.case.implementation
    )


def _time_and_rate(report: DecodeReport, row: Any) -> str:
    """TB/s of latents below 64 heads, TFLOP/s from there on."""
    figures = report.figures(row)
    name, digits = ("tbps", 2) if row.case.heads < 64 else ("tflops", 0)
    return f"{row.times.median * 1e6:.1f} ({figures[name]:.{digits}f})"
