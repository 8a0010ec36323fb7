"""Summary at the end of a run of all layers: slowest tests, failed ones, why tests were skipped.

``scripts/run_tests.sh`` has every layer's pytest write a file and then prints them together::

    ABSORBED_MLA_TEST_REPORT=unit.jsonl python -m pytest tests/unit
    python -m tests.support.report unit.jsonl ...
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "ABSORBED_MLA_TEST_REPORT"
SLOWEST = 15


class Recorder:
    """A pytest plugin that writes what became of every test to a file, one JSON object a line.

    Each has ``test`` (its id; a file's name if the whole file was skipped or cannot be imported),
    ``outcome`` (``"passed"``, ``"failed"`` or ``"skipped"``), ``seconds`` with what the test set
    up, and ``reason`` (why it was skipped or failed, else ``""``). Expected failures passed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report) -> None:
        """Count a phase of a test: setup, call or teardown, which comes last."""
        row = self._rows.setdefault(
            report.nodeid,
            {"test": report.nodeid, "outcome": "passed", "seconds": 0.0, "reason": ""},
        )
        row["seconds"] += report.duration
        if report.failed or (report.skipped and not hasattr(report, "wasxfail")):
            row |= {"outcome": report.outcome, "reason": _reason(report)}
        if report.when == "teardown":
            self._write(self._rows.pop(report.nodeid))

    def pytest_collectreport(self, report) -> None:
        """Count a file that is skipped as a whole, or cannot be imported."""
        if report.failed or report.skipped:
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": 0.0}
            self._write({**row, "reason": _reason(report)})

    def _write(self, row: dict[str, Any]) -> None:
        # At once: a process that is killed later has said what it did.
        with self.path.open("a") as file:
            print(json.dumps(row), file=file)


def _reason(report) -> str:
    """Why a test was skipped, or the first line of its error."""
    if report.skipped:
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines()
    # Of a file that cannot be imported the last line says why.
    return (lines[0] if crash else lines[-1])[:200] if lines else ""


def record(config: pytest.Config) -> None:
    """Record this run where ``VARIABLE`` names a file."""
    # The workers of pytest-xdist send their reports to the process that started them.
    if os.environ.get(VARIABLE) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(os.environ[VARIABLE])))


class _FailuresOnly:
    """What ranks other than 0 print: the tests that failed there."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            rank = os.environ.get("RANK")
            print(f"[rank {rank}] {report.nodeid} {report.when}\n{report.longreprtext}")


def only_failures(config: pytest.Config) -> None:
    """Report as ranks other than 0 do."""
    for plugin in config.pluginmanager.get_plugins():
        if isinstance(plugin, Recorder):
            config.pluginmanager.unregister(plugin)
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_FailuresOnly())


def summary(paths: Iterable[Path]) -> list[str]:
    """The lines to print; each file has the name of its layer."""
    slow, failed, skips = [], [], Counter()
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["outcome"] == "skipped":
                skips[row["reason"]] += 1
            else:
                slow.append((row["seconds"], path.stem, row["test"]))
            if row["outcome"] == "failed":
                failed.append(f"  {path.stem}  {row['test']}: {row['reason']}")
    lines = []
    if slow:
        lines += ["slowest tests, with what they set up:"]
        for seconds, layer, test in sorted(slow, reverse=True)[:SLOWEST]:
            lines.append(f"{seconds:7.1f}s  {layer}  {test}")
    if failed:
        lines += ["failed tests:", *failed]
    if skips:
        lines += ["skipped tests, by what they say:"]
        lines += [f"{count:7}   {reason}" for reason, count in skips.most_common()]
    return lines


if __name__ == "__main__":
    print("\n".join(summary(Path(name) for name in sys.argv[1:])))
