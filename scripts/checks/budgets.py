#!/usr/bin/env python3
"""Count the lines of Python and the words of documentation against their budgets.

    $ python scripts/checks/budgets.py
    absorbed_mla           51,900 lines of at most 52,300, to become 46,000
    ...
    docs                   21,800 words of at most 22,000

Whoever adds beyond a budget cuts elsewhere first. A budget is lowered when a folder has shrunk,
until it is what the folder is to become. Exit code 1 if one is exceeded.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from console.parser import Parser
from console.script import FAILED, leave, run_script

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Budget:
    """What the files of a folder may have together.

    Attributes:
        folder: Below the root of the repository, with all folders in it but ``but_not``.
        unit: ``"lines"`` of ``*.py``, or ``"words"`` of ``*.md``.
        most: Number beyond which the check fails.
        aim: Number that the budget is to come down to.
        but_not: A folder that does not count.
    """

    folder: str
    unit: str
    most: int
    aim: int
    but_not: str | None = None

    def count(self, root: Path) -> int:
        """Lines or words of the folder's files."""
        pattern = {"lines": "*.py", "words": "*.md"}[self.unit]
        texts = [
            path.read_text()
            for path in (root / self.folder).rglob(pattern)
            if self.but_not is None or not path.is_relative_to(root / self.but_not)
        ]
        return sum(len(t.splitlines() if self.unit == "lines" else t.split()) for t in texts)


BUDGETS = (
    Budget("absorbed_mla", "lines", 66_690, 46_000),
    Budget("checkpoint_conversion", "lines", 11_592, 9_000),
    Budget("specs", "lines", 800, 800),
    Budget("scripts", "lines", 23_170, 14_000),
    Budget("tests", "lines", 79_980, 52_000),
    Budget("docs", "words", 25_990, 22_000, but_not="docs/measurements"),
)


def report(root: Path, budgets: tuple[Budget, ...] = BUDGETS) -> tuple[list[str], bool]:
    """A line for each budget, and whether all are kept."""
    lines, kept = [], True
    for budget in budgets:
        count = budget.count(root)
        line = f"{budget.folder:22} {count:6,} {budget.unit} of at most {budget.most:,}"
        if budget.aim < budget.most:
            line += f", to become {budget.aim:,}"
        if count > budget.most:
            line += ": TOO MANY"
        lines.append(line)
        kept = kept and count <= budget.most
    return lines, kept


def main(argv: list[str] | None = None) -> int:
    """Print the counts; returns the exit code."""
    return run_script("budgets.py", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser("budgets.py", __doc__)
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="FOLDER", help="the repository to count"
    )
    root = parser.parse_args(argv).root
    if missing := [one.folder for one in BUDGETS if not (root / one.folder).is_dir()]:
        raise ValueError(f"--root must be a checkout of the repository; {root} has no {missing[0]}")
    lines, kept = report(root)
    print("\n".join(lines))
    return 0 if kept else FAILED


if __name__ == "__main__":
    leave(main())
