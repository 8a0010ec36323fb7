#!/usr/bin/env python3
"""Write the tables of README.md and docs/ from measured data and from the package's registries.

    $ python scripts/checks/docs_tables.py            # after new JSON files, or a new backend
    $ python scripts/checks/docs_tables.py --check    # exit code 1 if something is out of date

The text between `<!-- table: NAME -->` and `<!-- end -->` is replaced; the tables are those of
scripts/checks/tables/, of data in docs/measurements/ and of what absorbed_mla declares. So is the
plot of measurements/performance.md, which keeps the figures that it was drawn from. Layers are
compared with layers of the same recomputation, as in the benchmarks' own reports.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from checks.fuzz import results as fuzz
from checks.tables import measured, options, performance, plot
from console.parser import Parser
from console.script import run_script

DOCS = Path(__file__).resolve().parents[2] / "docs"
MEASUREMENTS = "measurements"  # under docs/: data, and the pages that say what was measured
PLOT = f"{MEASUREMENTS}/performance.png"
_BLOCK = re.compile(r"(<!-- table: ([a-z ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TABLES: dict[str, Callable[[Path], str]] = {
    **measured.TABLES,
    **performance.TABLES,
    **options.TABLES,
    "gpu fuzz": fuzz.page,
}


def main(argv: list[str] | None = None) -> int:
    """Write all tables and the plot, or compare them; returns the exit code."""
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
    bars, png = plot.bars(args.docs / MEASUREMENTS), args.docs / PLOT
    if bars and plot.drawn(png) != plot.described(bars):
        differing.append(png.name)
        if not args.check:
            plot.draw(bars, png)
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


if __name__ == "__main__":
    sys.exit(main())
