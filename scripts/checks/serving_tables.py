"""The table of docs/generation.md with our engine and server beside those of vLLM."""

from __future__ import annotations

from pathlib import Path

from benchmarks.served.report import ServingReport
from benchmarks.served.report import table as rows_table


def table(docs: Path) -> str:
    """Every measured row."""
    file = docs / "generation" / "serving.json"
    return rows_table(ServingReport.read(file)) if file.exists() else "Not measured yet."
