"""The tables of measurements/serving.md: ours beside vLLM's, and parity mode beside the default."""

from __future__ import annotations

from pathlib import Path

from benchmarks.served import report
from benchmarks.served.report import Row, ServingReport

_NONE = "Not measured yet."
# Several runs, because all rows together take longer than one may.
_BURSTS = ("serving.json", "serving-server.json", "serving-128x8k.json")


def table(docs: Path) -> str:
    """Every measured row of requests that arrive at once: of ``LLM``, then of the server."""
    files = [docs / "generation" / name for name in _BURSTS]
    found = [ServingReport.read(file) for file in files if file.exists()]
    if not found:
        return _NONE
    rows = sorted((row for one in found for row in one.rows), key=_place)
    return report.table(ServingReport(found[0].environment, rows))


def _place(row: Row) -> tuple[str, int, int, float]:
    case = row.case
    return case.implementation, case.size.prompt, case.size.requests, case.temperature


def traffic_table(docs: Path) -> str:
    """Every measured row of requests that take the place of others."""
    file = docs / "generation" / "traffic.json"
    return report.table(ServingReport.read(file), traffic=True) if file.exists() else _NONE


def parity_table(docs: Path) -> str:
    """Every measured row of parity mode, those of traffic in a table of their own."""
    file = docs / "generation" / "serving-parity.json"
    if not file.exists():
        return _NONE
    found = ServingReport.read(file)
    tables = (report.parity_table(found, traffic=traffic) for traffic in (False, True))
    return "\n\n".join(filter(None, tables)) or _NONE
