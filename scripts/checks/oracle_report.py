#!/usr/bin/env python3
"""Turn the error tables that the oracle tests write into a Markdown report, a summary and a plot.

    $ ABSORBED_MLA_ERROR_TABLE=errors.jsonl torchrun --nproc-per-node 2 -m pytest tests/distributed
    $ python scripts/checks/oracle_report.py docs/measurements/accuracy errors.jsonl

The tests append one JSON object per combination; see tests/support/error_table.py. An error is the
relative Frobenius norm of the worst tensor among output, input gradient and the gradient of every
parameter. A case of summary.json is the worst of all combinations that differ only in shape,
recomputation, sequence parallelism and down-projections.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kit.tables import markdown_table
from console.figure import figure
from console.outputs import require_writable
from console.parser import Parser
from console.script import leave, run_script

# Columns of a combination, in the order of the table, and their heads.
COLUMNS = {
    "tensor_parallel": "TP",
    "context_parallel": "CP",
    "cp_comm_type": "exchange",
    "sequence_parallel": "SP",
    "down_projection": "down-projection",
    "form": "form",
    "recompute": "recompute",
    "core_attention_backend": "core attention",
}
# Values of columns that older tables do not have.
DEFAULTS = {"context_parallel": 1, "cp_comm_type": None, "core_attention_backend": "auto"}
PRECISION = ("device", "backend", "dtype", "rotary_table")
# What makes a case of summary.json, and what it says about its combinations.
CASE = (*PRECISION, "core_attention_backend", "layout")
CASE += ("tensor_parallel", "context_parallel", "cp_comm_type", "form")
FIGURES = ("combinations", "worst_relative_error", "least_bound", "greatest_bound")
FIGURES += ("worst_error_over_bound", "tensor")


def main() -> int:
    """Write summary.json, errors.md and errors.png into a folder; returns the exit code."""
    return run_script("oracle_report.py", _report)


def _report() -> None:
    parser = Parser("oracle_report.py", __doc__)
    parser.add_argument("folder", type=Path, help="where summary.json, errors.md and .png go")
    parser.add_argument("tables", type=Path, nargs="+", help="JSON-lines files of the tests")
    arguments = parser.parse_args()
    missing = [str(path) for path in arguments.tables if not path.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}")
    rows = [DEFAULTS | json.loads(line) for path in arguments.tables for line in path.open()]
    if not rows:
        parser.error("the tables hold no rows")
    require_writable(folders={"folder": arguments.folder})
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows.sort(key=lambda row: [str(row.get(c)) for c in (*PRECISION, *COLUMNS, "layout", "shape")])
    write_summary(rows, arguments.folder / "summary.json")
    by_precision = summary_table(rows)
    exact = [r for r in rows if r["dtype"] == "float64" and r["rotary_table"].startswith("module")]
    report = _REPORT.format(by_precision, combination_table(exact))
    (arguments.folder / "errors.md").write_text(report)
    plot(rows, arguments.folder / "errors.png")
    print(by_precision)


_REPORT = """# Errors against the float64 oracle

Written by `scripts/checks/oracle_report.py` from what the tests recorded. An error is \
the relative Frobenius norm of the worst tensor among output, input gradient and the \
gradient of every parameter.

## Worst of all combinations, by precision

{}

## Every combination in float64, same rotary table

{}
"""


def write_summary(rows: list[dict], path: Path) -> None:
    """Write every case with its worst error, its bounds and the tensor nearest to its bound."""
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


def summary_table(rows: list[dict]) -> str:
    """One row per device, kind of layers, dtype and rotary table."""
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(str(row[c]) for c in PRECISION)].append(row)
    head = ["device", "layers", "dtype", "rotary table", "combinations", "nearest its bound"]
    head += ["bound", "tensor"]
    lines = []
    for key, group in sorted(groups.items()):
        nearest = max(group, key=share_of_bound)
        errors = [f"{nearest[name]:.1e}" for name in ("worst_relative_error", "bound")]
        lines.append([*key, str(len(group)), *errors, nearest["tensor"]])
    return markdown_table(head, lines, head)


def combination_table(rows: list[dict]) -> str:
    """The worst error of each combination over the shapes tested; layouts side by side."""
    layouts = sorted({row["layout"] for row in rows})
    cells: dict[tuple, dict[str, float]] = defaultdict(dict)
    for row in rows:
        key = tuple("-" if row[c] is None else str(row[c]) for c in COLUMNS)
        worst = max(cells[key].get(row["layout"], 0.0), row["worst_relative_error"])
        cells[key][row["layout"]] = worst
    lines = [
        [*key, *(f"{by_layout[n]:.1e}" if n in by_layout else "" for n in layouts)]
        for key, by_layout in sorted(cells.items(), key=str)
    ]
    head = [*COLUMNS.values(), *layouts]
    return markdown_table(head, lines, head)


def plot(rows: list[dict], path: Path) -> None:
    """Every combination's worst error over its own bound, by precision: below 1 is within it.

    Bounds differ from tensor to tensor, so an error may only be compared with its own.
    """
    by_name = defaultdict(list)
    for row in rows:
        table = "" if row["dtype"] != "float64" else f"\n{row['rotary_table'].split()[0]} table"
        by_name[f"{row['device']} {row['backend']}\n{row['dtype']}{table}"].append(row)
    names = sorted(by_name)
    with figure(path, 1, 1, (max(6, 1.6 * len(names)), 4.5)) as [[axes]]:
        for i, name in enumerate(names):
            shares = [share_of_bound(row) for row in by_name[name]]
            beside = [i + 0.5 * (j / max(len(shares) - 1, 1) - 0.5) for j in range(len(shares))]
            label = None if i else "combination"
            axes.scatter(beside, shares, s=6, color="tab:blue", label=label)
            # Above the line of the bound, which they would cross beside the points.
            axes.text(i, 1.6, f"worst {max(shares):.2g}", ha="center", fontsize=8)
        axes.axhline(1, color="tab:red", label="bound: above it a test fails")
        axes.set_yscale("log")
        axes.set_ylim(top=10)
        axes.set_xticks(range(len(names)), names, fontsize=7)
        axes.set_ylabel("error / bound (below 1 is good)")
        axes.set_title("Absorbed MLA against the float64 oracle: worst tensor of each combination")
        axes.legend(loc="lower left", fontsize=8)
        axes.grid(axis="y", alpha=0.3)


if __name__ == "__main__":
    leave(main())
