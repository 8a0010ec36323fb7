#!/usr/bin/env python3
"""Summarise the error tables that the oracle tests write.

    $ ABSORBED_MLA_ERROR_TABLE=errors.jsonl torchrun --nproc-per-node 2 -m pytest tests/distributed
    $ python scripts/checks/oracle_report.py docs/measurements/accuracy/cpu/summary.json *.jsonl

The tests append one JSON object per combination; see tests/support/error_table.py. An error is the
relative Frobenius norm of the worst tensor among output, input gradient and the gradient of every
parameter. A case of the summary is the worst of all combinations that differ only in shape,
recomputation, sequence parallelism and down-projections.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from console.outputs import require_writable
from console.parser import Parser
from console.script import leave, run_script

# What makes a case, and what the summary says about its combinations.
CASE = ("device", "backend", "dtype", "rotary_table", "core_attention_backend", "layout")
CASE += ("tensor_parallel", "context_parallel", "cp_comm_type", "form")
FIGURES = ("combinations", "worst_relative_error", "least_bound", "greatest_bound")
FIGURES += ("worst_error_over_bound", "tensor")


def main(argv: list[str] | None = None) -> int:
    """Write the summary; returns the exit code."""
    return run_script("oracle_report.py", lambda: _report(argv))


def _report(argv: list[str] | None) -> None:
    parser = Parser("oracle_report.py", __doc__)
    parser.add_argument("summary", type=Path, help="JSON file to write")
    parser.add_argument("tables", type=Path, nargs="+", help="JSON-lines files of the tests")
    arguments = parser.parse_args(argv)
    missing = [str(path) for path in arguments.tables if not path.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}")
    rows = [json.loads(line) for path in arguments.tables for line in path.open()]
    if not rows:
        parser.error("the tables hold no rows")
    require_writable(files={"summary": arguments.summary})
    rows.sort(key=lambda row: [str(row[column]) for column in CASE])
    write_summary(rows, arguments.summary)


def write_summary(rows: list[dict], path: Path) -> None:
    """Write every case with its worst error, its bounds and the tensor nearest to its bound.

    Bounds differ from tensor to tensor, so an error is only compared with its own.
    """
    cases = defaultdict(list)
    for row in rows:
        cases[tuple(row[c] for c in CASE)].append(row)
    lines = []
    for case, group in cases.items():
        nearest = max(group, key=share_of_bound)
        errors = [row["worst_relative_error"] for row in group]
        bounds = [row["bound"] for row in group]
        figures = [max(errors), min(bounds), max(bounds), share_of_bound(nearest)]
        figures = [float(f"{figure:.6g}") for figure in figures]
        lines.append(json.dumps([*case, len(group), *figures, nearest["tensor"]]))
    head = json.dumps([*CASE, *FIGURES])
    path.write_text(f'{{"columns": {head},\n"cases": [\n' + ",\n".join(lines) + "\n]}\n")


def read_summary(path: Path) -> list[dict]:
    """The cases that :func:`write_summary` wrote, by the names of ``CASE`` and ``FIGURES``."""
    content = json.loads(path.read_text())
    return [dict(zip(content["columns"], case)) for case in content["cases"]]


def share_of_bound(row: dict) -> float:
    """Error over bound; above 1 the test has failed."""
    return row["worst_relative_error"] / row["bound"]


if __name__ == "__main__":
    leave(main())
