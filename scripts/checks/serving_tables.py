"""The tables of docs/generation.md: ours beside vLLM's, and parity mode beside the default mode."""

from __future__ import annotations

from pathlib import Path

from benchmarks.served import report
from benchmarks.served.report import ServingReport

_NONE = "Not measured yet."


def table(docs: Path) -> str:
    """Every measured row of requests that arrive at once."""
    file = docs / "generation" / "serving.json"
    return report.table(ServingReport.read(file)) if file.exists() else _NONE


def traffic_table(docs: Path) -> str:
    """Every measured row of requests that take the place of others."""
    file = docs / "generation" / "traffic.json"
    return report.traffic_table(ServingReport.read(file)) if file.exists() else _NONE


def parity_table(docs: Path) -> str:
    """Every measured row of parity mode, those of traffic in a table of their own."""
    file = docs / "generation" / "serving-parity.json"
    if not file.exists():
        return _NONE
    found = ServingReport.read(file)
    tables = (report.parity_table(found), report.parity_traffic_table(found))
    return "\n\n".join(filter(None, tables)) or _NONE
