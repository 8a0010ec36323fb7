"""What became of the tests of a job, from what its process wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from checks.gpu_tests.plan import Job


@dataclass
class FileResult:
    """Of one file, by the first process.

    Attributes:
        file: Its path below the root.
        processes: See :class:`Job`.
        passed: Tests that passed, or failed as expected.
        failed: Tests that failed.
        skipped: Tests that were skipped.
        seconds: Of the tests.
        skips: Skipped tests by reason.
        failures: First line of the error by test.
        ended: ``""`` if the process went through the file and ended as its tests say, else how it
            ended.
        log: Output of the process, below the folder of the results.
    """

    file: str
    processes: int
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    skips: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    ended: str = ""
    log: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether a test failed, or the process did."""
        return bool(self.failed or self.ended)

    @property
    def ran_nothing(self) -> bool:
        """Whether all tests were skipped."""
        return not (self.passed or self.failed or self.ended)

    def line(self) -> str:
        """For the terminal."""
        counts = [
            f"{count} {name}"
            for name in ("passed", "failed", "skipped")
            if (count := getattr(self, name))
        ]
        processes = f" ({self.processes} processes)" if self.processes > 1 else ""
        ended = f"; {self.ended}" if self.ended else ""
        return f"{self.seconds:6.1f}s  {self.file}{processes}: {', '.join(counts)}{ended}"


def results_of(job: Job, report: Path, ended: str, log: str) -> list[FileResult]:
    """One for each file of a job.

    Args:
        job: That ran, or did not.
        report: What ``tests/support/report.py`` wrote; need not exist.
        ended: How the process ended other than by tests that passed, failed or were skipped.
        log: Name of the file with its output.
    """
    found = {name: FileResult(name, job.processes, log=log) for name in job.files}
    for row in _rows(report):
        result = found.get(row["test"].partition("::")[0])
        if result is not None:
            _count(result, row)
    results = list(found.values())
    # One process runs a job's files in their order: the last with a test is where it ended.
    reached = max((i for i, one in enumerate(results) if one.passed + one.failed), default=0)
    for index, result in enumerate(results):
        nothing = not (result.passed or result.failed or result.skipped)
        if ended and (index >= reached or nothing):
            result.ended = ended
        elif nothing:
            result.ended = "no test was collected"
    return results


def seconds_by_file(results: Iterable[FileResult]) -> dict[str, float]:
    """Of all jobs' tests of each file; without files of which a process ended otherwise."""
    found: dict[str, list[FileResult]] = {}
    for one in results:
        found.setdefault(one.file, []).append(one)
    return {
        name: round(sum(one.seconds for one in parts), 1)
        for name, parts in found.items()
        if not any(one.ended for one in parts)
    }


def _rows(report: Path) -> list[dict]:
    if not report.exists():
        return []
    lines = report.read_text().splitlines()
    # A process that was killed may have written half of the last one.
    return [json.loads(line) for line in lines if line.endswith("}")]


def _count(result: FileResult, row: dict) -> None:
    setattr(result, row["outcome"], getattr(result, row["outcome"]) + 1)
    result.seconds = round(result.seconds + row["seconds"], 2)
    if row["outcome"] == "skipped":
        result.skips[row["reason"]] = result.skips.get(row["reason"], 0) + 1
    elif row["outcome"] == "failed":
        result.failures[row["test"]] = row["reason"]
