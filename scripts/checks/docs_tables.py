#!/usr/bin/env python3
"""Write the tables of README.md and docs/ from measured data and from the package's registries.

    $ python scripts/checks/docs_tables.py            # after new JSON files, or a new backend
    $ python scripts/checks/docs_tables.py --check    # exit code 1 if a table is out of date

The text between `<!-- table: NAME -->` and `<!-- end -->` is replaced. The data are those of
docs/measurements/. Layers are compared with layers of the same recomputation, as in the benchmarks'
own reports. The tables "support ..." list the implementations in absorbed_mla (support_matrix.py),
those of options what is declared in absorbed_mla/serving (option_tables.py).
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.attention import AttentionReport
from benchmarks.context_parallel import CPReport
from benchmarks.context_parallel import Row as CPRow
from benchmarks.kit.tables import markdown_table, tokens_text
from checks import (
    decode_tables,
    drawing_table,
    latent_cache_accuracy,
    option_tables,
    serving_tables,
    sparse_tables,
)
from checks.beside_transformers import table as beside_transformers
from checks.fuzz import tables as fuzz
from checks.oracle_report import read_summary
from checks.performance import tables as performance
from checks.support_matrix import KINDS, support_table
from console.parser import Parser
from console.script import run_script

DOCS = Path(__file__).resolve().parents[2] / "docs"
MEASUREMENTS = "measurements"  # under docs/: data, and the pages that say what was measured
MACHINES = {"cpu": "CPU, gloo", "h200": "H200, NCCL"}
_BLOCK = re.compile(r"(<!-- table: ([a-z ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

# Both layers recompute `mla_up_proj` (R), then neither does.
_PAIR_HEAD = [
    f"{way}{name}"
    for way in ("R: ", "no R: ")
    for name in ("Megatron ms", "ours ms", "ratio", "Megatron MiB", "ours MiB", "ratio")
]


def main(argv: list[str] | None = None) -> int:
    """Write all tables, or compare them; returns the exit code."""
    parser = Parser("docs_tables.py", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if one differs")
    docs = "folder of the pages, beside README.md"
    parser.add_argument("--docs", type=Path, default=DOCS, help=docs)
    return run_script("docs_tables.py", lambda: _run(parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    if not args.docs.is_dir():
        raise ValueError(f"--docs must be a folder, got {args.docs}")
    # Megatron warns about every optional package it does not find.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    differing = []
    for page in pages(args.docs):
        text = page.read_text()
        wanted = filled(text, args.docs)
        if wanted != text:
            differing.append(page.name)
            if not args.check:
                page.write_text(wanted)
    print(f"{'Differ' if args.check else 'Written'}: {', '.join(differing) or 'none'}")
    return int(bool(differing) and args.check)


def pages(docs: Path) -> list[Path]:
    """Every page of ``docs`` and its measurements, and the README beside it."""
    found = [*docs.glob("*.md"), *(docs / MEASUREMENTS).glob("*.md")]
    return sorted([*found, *docs.parent.glob("README.md")])


def filled(text: str, docs: Path) -> str:
    """A page with every table as its data says.

    Raises:
        KeyError: If a table is unknown.
    """
    return _BLOCK.sub(lambda m: f"{m[1]}{TABLES[m[2]](docs / MEASUREMENTS)}\n{m[4]}", text)


def layer_table(docs: Path) -> str:
    """Whole layers on one GPU, ours and Megatron's with the same recomputation."""
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
    report = AttentionReport.read(docs / "attention" / "layer.json")
    found: dict[tuple, dict[bool, tuple]] = {}
    for row in report.of("layer"):
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
        report = CPReport.read(file)
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


def _ring_figures(row: CPRow, hidden: int) -> dict[str, float]:
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
    """The worst error of each precision, and the largest share of its own bound."""
    groups: dict[tuple, list[dict]] = {}
    for machine, name in MACHINES.items():
        for case in read_summary(docs / "accuracy" / machine / "summary.json"):
            interpreted = machine == "cpu" and case["core_attention_backend"] == "triton"
            layers = case["backend"] + (", `triton` interpreted" if interpreted else "")
            key = (name, case["dtype"], case["rotary_table"], layers)
            groups.setdefault(key, []).append(case)
    lines = []
    for (machine, dtype, table, layers), cases in sorted(groups.items()):
        cached = [case for case in cases if case["layout"].startswith("cached")]
        whole = [case for case in cases if case not in cached]
        kinds = [[c for c in whole if (c["context_parallel"] > 1) is cp] for cp in (False, True)]
        bounds = (min(c["least_bound"] for c in cases), max(c["greatest_bound"] for c in cases))
        lines.append(
            [
                machine,
                layers,
                f"{dtype}, {table.split()[0]} table" if dtype == "float64" else dtype,
                str(sum(case["combinations"] for case in cases)),
                *map(_worst, (*kinds, cached)),
                " to ".join(dict.fromkeys(f"{bound:.1e}" for bound in bounds)),
                f"{max(case['worst_error_over_bound'] for case in cases):.2g}",
            ]
        )
    head = ["machine", "layers", "precision", "combinations", "worst, TP 1, 2, 4", "worst, CP"]
    head += ["worst, from a cache", "bounds", "worst error / bound"]
    return markdown_table(head, lines, ["machine", "layers", "precision"])


def _worst(cases: list[dict]) -> str:
    return f"{max(case['worst_relative_error'] for case in cases):.1e}" if cases else "-"


def _support_table(name: str, docs: Path) -> str:
    """Of the registries, whatever the data under ``docs``."""
    return support_table(name)


TABLES: dict[str, Callable[[Path], str]] = {
    "layers": layer_table,
    "layer ranges": layer_ranges,
    "context parallel": ring_table,
    "context parallel ranges": ring_ranges,
    "accuracy": accuracy_table,
    "beside transformers": beside_transformers.table,
    "sparse forward": sparse_tables.forward_table,
    "sparse backward": sparse_tables.backward_table,
    "indexer": sparse_tables.indexer_table,
    "sparse decode": sparse_tables.decode_table,
    "sparse layer": sparse_tables.layer_table,
    "decode": decode_tables.equal_table,
    "decode lengths": decode_tables.lengths_table,
    "latent cache": latent_cache_accuracy.table,
    "drawing": drawing_table.table,
    "gpu fuzz": fuzz.page,
    "beside vllm": serving_tables.table,
    "traffic beside vllm": serving_tables.traffic_table,
    "parity mode beside default": serving_tables.parity_table,
    **performance.TABLES,
    **option_tables.TABLES,
    **{name: partial(_support_table, name) for name in KINDS},
}


if __name__ == "__main__":
    sys.exit(main())
