"""Summary at the end of a run of all layers: the slowest tests, and why tests were skipped.

``scripts/run_tests.sh`` has every layer's pytest write a file and then prints them together::

    ABSORBED_MLA_TEST_REPORT=unit.jsonl python -m pytest tests/unit
    python -m tests.support.report unit.jsonl ...
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

VARIABLE = "ABSORBED_MLA_TEST_REPORT"
SLOWEST = 15


class Recorder:
    """A pytest plugin that writes the slowest tests, and the reasons of skips, to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: Counter[str] = Counter()
        self.skips: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report) -> None:
        """Count a phase of a test: setup, call or teardown."""
        self.seconds[report.nodeid] += report.duration
        self._count(report)

    def pytest_collectreport(self, report) -> None:
        """Count a file that is skipped as a whole."""
        self._count(report)

    def _count(self, report) -> None:
        # Expected failures are reported as skipped, too.
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skips[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        with self.path.open("a") as file:
            for reason, count in self.skips.items():
                print(json.dumps({"reason": reason, "count": count}), file=file)
            for test, seconds in self.seconds.most_common(SLOWEST):
                print(json.dumps({"test": test, "seconds": seconds}), file=file)


def record(config: pytest.Config) -> None:
    """Record this run where ``VARIABLE`` names a file."""
    # The workers of pytest-xdist send their reports to the process that started them.
    if os.environ.get(VARIABLE) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(os.environ[VARIABLE])))


def summary(paths: Iterable[Path]) -> list[str]:
    """The lines to print; each file has the name of its layer."""
    slow, skips = [], Counter()
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "test" in row:
                slow.append((row["seconds"], path.stem, row["test"]))
            else:
                skips[row["reason"]] += row["count"]
    lines = []
    if slow:
        lines += ["slowest tests, with what they set up:"]
        for seconds, layer, test in sorted(slow, reverse=True)[:SLOWEST]:
            lines.append(f"{seconds:7.1f}s  {layer}  {test}")
    if skips:
        lines += ["skipped tests, by what they say:"]
        lines += [f"{count:7}   {reason}" for reason, count in skips.most_common()]
    return lines


if __name__ == "__main__":
    print("\n".join(summary(Path(name) for name in sys.argv[1:])))
