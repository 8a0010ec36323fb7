"""The tables of docs/generation.md with our engine and server beside those of vLLM."""

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
