#!/usr/bin/env python3
"""Write the tables and the plot of docs/measurements/performance.md from the results beside it.

    $ python scripts/checks/performance_table.py            # exit code 1 if page or plot is old
    $ python scripts/checks/performance_table.py --write    # after new JSON files

What is compared is in performance/sections.py; docs_tables.py writes the tables, too. The plot
keeps the figures that it was drawn from, so that an old one is found without drawing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from checks.docs_tables import DOCS, MEASUREMENTS, filled
from checks.performance import plot
from console.parser import Parser
from console.script import run_script

PAGE, PLOT = f"{MEASUREMENTS}/performance.md", f"{MEASUREMENTS}/performance.png"


def main(argv: list[str] | None = None) -> int:
    """Compare page and plot with the data, or write them; returns the exit code."""
    parser = Parser("performance_table.py", __doc__)
    parser.add_argument("--write", action="store_true", help="write what differs")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the pages")
    return run_script("performance_table.py", lambda: _run(parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    page, png = args.docs / PAGE, args.docs / PLOT
    text, bars = page.read_text(), plot.bars(args.docs / MEASUREMENTS)
    wanted = filled(text, args.docs)
    old = [PAGE] if wanted != text else []
    old += [PLOT] if plot.drawn(png) != plot.described(bars) else []
    if args.write and PAGE in old:
        page.write_text(wanted)
    if args.write and PLOT in old:
        plot.draw(bars, png)
    print(f"{'Written' if args.write else 'Differ'}: {', '.join(old) or 'none'}")
    return int(bool(old) and not args.write)


if __name__ == "__main__":
    sys.exit(main())
