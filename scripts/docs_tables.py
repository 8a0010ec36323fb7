#!/usr/bin/env python3
"""Write the tables of measurements in docs/*.md from the files that the benchmarks left.

    $ python scripts/docs_tables.py            # after new JSON files under docs/
    $ python scripts/docs_tables.py --check    # exit code 1 if a table is not what its data says

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is between is replaced. A
layer that recomputes is compared with one that recomputes, and one that does not with one that does
not, here as in the benchmarks' own reports.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parent.parent))
# Megatron warns about every optional package it does not find.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")

from attention_benchmark.report import Report as LayerReport  # noqa: E402
from benchmark_report import markdown_table  # noqa: E402
from console.parser import Parser  # noqa: E402
from console.script import run_script  # noqa: E402
from context_parallel_benchmark.report import Report as RingReport  # noqa: E402
from context_parallel_benchmark.report import tokens_text  # noqa: E402
from context_parallel_benchmark.row import Row as RingRow  # noqa: E402
from oracle_report import read_summary  # noqa: E402

DOCS = Path(__file__).resolve().parents[1] / "docs"
_BLOCK = re.compile(r"(<!-- table: ([a-z ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

# Both layers recompute `mla_up_proj` (R), then neither does.
_PAIR_HEAD = [
    f"{way}{name}"
    for way in ("R: ", "no R: ")
    for name in ("Megatron ms", "ours ms", "ratio", "Megatron MiB", "ours MiB", "ratio")
]


def main(argv: list[str] | None = None) -> int:
    """Write all tables, or compare them; returns the exit code."""
    return run_script("docs_tables.py", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    parser = Parser("docs_tables.py", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if one differs")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the pages")
    args = parser.parse_args(argv)
    differing = []
    for page in sorted(args.docs.glob("*.md")):
        text = page.read_text()
        wanted = filled(text, args.docs)
        if wanted != text:
            differing.append(page.name)
            if not args.check:
                page.write_text(wanted)
    print(f"{'Differ' if args.check else 'Written'}: {', '.join(differing) or 'none'}")
    return int(bool(differing) and args.check)


def filled(text: str, docs: Path) -> str:
    """A page with every table as its data says.

    Raises:
        KeyError: If a table is unknown.
    """
    return _BLOCK.sub(lambda m: f"{m[1]}{TABLES[m[2]](docs)}\n{m[4]}", text)


def layer_table(docs: Path) -> str:
    """Whole layers on one GPU, recomputed beside recomputed and kept beside kept."""
    lines = []
    for (heads, layout, tokens), pairs in _layer_pairs(docs).items():
        line = [str(heads), tokens_text(tokens), layout]
        for recompute in (True, False):
            ours, theirs, ratios = pairs[recompute]
            line += [f"{1e3 * row.step.median:.2f}" for row in (theirs, ours)]
            line += [f"{ratios['step']:.2f}"]
            line += [f"{row.kept_bytes / 2**20:.0f}" for row in (theirs, ours)]
            line += [f"{ratios['kept']:.2f}"]
        lines.append(line)
    return markdown_table(["heads", "S", "layout", *_PAIR_HEAD], lines, ["layout"])


def layer_ranges(docs: Path) -> str:
    """The least and the greatest ratio over the lengths of :func:`layer_table`."""
    found: dict[tuple, list[dict[str, float]]] = {}
    for (heads, layout, _), pairs in _layer_pairs(docs).items():
        for recompute, (_, _, ratios) in pairs.items():
            found.setdefault((heads, layout, recompute), []).append(ratios)
    lines = [
        [
            str(heads),
            layout,
            "mla_up_proj" if recompute else "-",
            *(_range([one[name] for one in ratios]) for name in ("step", "kept")),
        ]
        for (heads, layout, recompute), ratios in found.items()
    ]
    head = ["heads", "layout", "both recompute", "step, ours of Megatron's", "kept"]
    return markdown_table(head, lines, ["layout", "both recompute"])


def _layer_pairs(docs: Path) -> dict[tuple, dict[bool, tuple]]:
    """By heads, layout and tokens, and by recomputation: ours, Megatron's, and ratios."""
    report = LayerReport.read(docs / "attention" / "layer.json")
    found: dict[tuple, dict[bool, tuple]] = {}
    for row in report.measured("layer"):
        case = row.case
        if case.implementation == "ours":
            pairs = found.setdefault((case.heads, case.layout, case.tokens), {})
            pairs[case.recompute] = (row, report.peer(row), report.ratios(row))
    return dict(sorted(found.items(), key=lambda one: (-one[0][0], *one[0][1:])))


def ring_table(docs: Path) -> str:
    """A layer under context parallelism; memory kept is less the layer's output."""
    by_input: dict[tuple, dict[str, tuple]] = {}
    for (*inputs, recompute), ours, theirs in _ring_pairs(docs):
        by_input.setdefault(tuple(inputs), {})[recompute] = (theirs, ours)
    lines = []
    for (cp_size, layout, documents, heads, tokens), ways in by_input.items():
        line = [str(cp_size), layout if layout == "sbhd" else f"thd, {documents} documents"]
        line += [str(heads), tokens_text(tokens)]
        for way in ("mla_up_proj", "none"):
            theirs, ours = ways.get(way, (None, None))
            for name, text in (("step", "{:.1f}"), ("kept, less output", "{:.0f}")):
                line += [text.format(one[name]) if one else "-" for one in (theirs, ours)]
                line += [_ratio(ours, theirs, name)]
        lines.append(line)
    return markdown_table(["GPUs", "layout", "heads", "S", *_PAIR_HEAD], lines, ["layout"])


def ring_ranges(docs: Path) -> str:
    """The least and the greatest ratio over sizes and heads of :func:`ring_table`."""
    found: dict[tuple, list[tuple]] = {}
    for (cp_size, layout, _, _, _, recompute), ours, theirs in _ring_pairs(docs):
        if ours and theirs:
            found.setdefault((cp_size, layout, recompute), []).append((ours, theirs))
    if not found:
        return "Not measured: both layers with the same recomputation."
    lines = []
    for (cp_size, layout, recompute), pairs in found.items():
        line = [str(cp_size), layout, "-" if recompute == "none" else recompute]
        for name in ("step", "kept, less output"):
            line.append(_range([ours[name] / theirs[name] for ours, theirs in pairs]))
        lines.append(line)
    head = ["GPUs", "layout", "both recompute", "step, ours of Megatron's", "kept, less output"]
    return markdown_table(head, lines, ["layout", "both recompute"])


def _ring_pairs(docs: Path) -> Iterator[tuple[tuple, dict | None, dict | None]]:
    """Inputs and recomputation; figures of ours (``all_gather``) and of Megatron's, or None."""
    found: dict[tuple, dict[str, dict]] = {}
    for file in sorted((docs / "context-parallel").glob("*.json")):
        report = RingReport.read(file)
        hidden = report.environment["dims"]["hidden-size"]
        for row in report.rows:
            case = row.case
            if row.error or (case.implementation, case.cp_comm_type) == ("ours", "p2p"):
                continue
            inputs = (row.cp_size, case.layout, case.documents, case.heads, case.tokens)
            figures = _ring_figures(row, hidden)
            found.setdefault((*inputs, case.recompute), {})[case.implementation] = figures
    for inputs, pair in sorted(found.items()):
        yield inputs, pair.get("ours"), pair.get("megatron")


def _ring_figures(row: RingRow, hidden: int) -> dict[str, float]:
    """Milliseconds, and MiB less the layer's output, which is in bf16."""
    output = row.case.tokens // row.cp_size * hidden * 2
    return {
        "step": 1e3 * median(row.step_seconds),
        "kept, less output": (row.kept_bytes - output) / 2**20,
    }


def _ratio(ours: dict | None, theirs: dict | None, name: str) -> str:
    return f"{ours[name] / theirs[name]:.2f}" if ours and theirs else "-"


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def accuracy_table(docs: Path) -> str:
    """The worst error of each precision, and how near any came to its own bound."""
    groups: dict[tuple, list[dict]] = {}
    for machine in ("cpu", "h200"):
        for row in read_summary(docs / "accuracy" / machine / "summary.json"):
            interpreted = machine == "cpu" and row["core_attention_backend"] == "triton"
            layers = row["backend"] + (", `triton` interpreted" if interpreted else "")
            key = (MACHINES[machine], row["dtype"], row["rotary_table"], layers)
            groups.setdefault(key, []).append(row)
    lines = []
    for (machine, dtype, table, layers), rows in sorted(groups.items()):
        cached = [row for row in rows if row["layout"].startswith("cached")]
        whole = [row for row in rows if not row["layout"].startswith("cached")]
        kinds = [[r for r in whole if (r["context_parallel"] > 1) is cp] for cp in (False, True)]
        worst = [_worst(kind) for kind in (*kinds, cached)]
        nearest = max(row["worst_error_over_bound"] for row in rows)
        shown = f"{dtype}, {table.split()[0]} table" if dtype == "float64" else dtype
        bounds = (min(r["least_bound"] for r in rows), max(r["greatest_bound"] for r in rows))
        count = sum(row["combinations"] for row in rows)
        lines.append([machine, layers, shown, str(count), *worst,
                      " to ".join(dict.fromkeys(f"{bound:.1e}" for bound in bounds)),
                      f"{nearest:.2g}"])  # fmt: skip
    head = ["machine", "layers", "precision", "combinations", "worst, TP 1, 2, 4", "worst, CP"]
    head += ["worst, from a cache", "bounds", "worst error / bound"]
    return markdown_table(head, lines, ["machine", "layers", "precision"])


def _worst(rows: list[dict]) -> str:
    return f"{max(row['worst_relative_error'] for row in rows):.1e}" if rows else "-"


MACHINES = {"cpu": "CPU, gloo", "h200": "H200, NCCL"}
TABLES: dict[str, Callable[[Path], str]] = {
    "layers": layer_table,
    "layer ranges": layer_ranges,
    "context parallel": ring_table,
    "context parallel ranges": ring_ranges,
    "accuracy": accuracy_table,
}


if __name__ == "__main__":
    sys.exit(main())
