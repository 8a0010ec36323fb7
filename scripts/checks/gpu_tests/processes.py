"""Runs jobs side by side, each in processes of its own, within a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checks.gpu_tests.plan import Job
from console.parent import ends_with_this_process

_POLL = 0.1
# Return codes of pytest and torchrun: of tests that passed, that failed, of files that are skipped.
_PASSED, _FAILED, _NOTHING = 0, 1, 5
# A test that takes longer prints where its threads are.
_SLOW_TEST = 150


@dataclass(frozen=True)
class Limits:
    """What jobs may take."""

    jobs: int  # how many run at the same time
    job_seconds: float  # one that takes longer is killed
    seconds: float  # when all jobs are killed or not started, counted from the beginning
    memory_gib: float  # of a GPU, that a process of a job that is not alone may allocate; 0: any


@dataclass
class FileResult:
    """What became of the tests of one file, by the first process."""

    file: str  # its path below the root
    processes: int  # see :class:`Job`
    passed: int = 0  # tests that passed, or failed as expected
    failed: int = 0  # tests that failed
    skipped: int = 0  # tests that were skipped
    seconds: float = 0.0  # of the tests
    skips: dict[str, int] = field(default_factory=dict)  # skipped tests by reason
    failures: dict[str, str] = field(default_factory=dict)  # first line of the error by test
    # ``""`` if the process went through the file and ended as its tests say, else how it ended.
    ended: str = ""
    log: str = ""  # output of the process, below the folder of the results

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
        names = ("passed", "failed", "skipped")
        counts = ", ".join(f"{getattr(self, one)} {one}" for one in names if getattr(self, one))
        processes = f" ({self.processes} processes)" if self.processes > 1 else ""
        ended = f"; {self.ended}" if self.ended else ""
        return f"{self.seconds:6.1f}s  {self.file}{processes}: {counts}{ended}"

    def count(self, row: dict) -> None:
        """One test, as ``tests/support/report.py`` writes it."""
        outcome, reason = row["outcome"], row["reason"]
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.seconds = round(self.seconds + row["seconds"], 2)
        if outcome == "skipped":
            self.skips[reason] = self.skips.get(reason, 0) + 1
        elif outcome == "failed":
            self.failures[row["test"]] = reason


def results_of(job: Job, report: Path, ended: str, log: str) -> list[FileResult]:
    """One for each file of a job.

    Args:
        job: That ran, or did not.
        report: What ``tests/support/report.py`` wrote; need not exist.
        ended: How the process ended other than by tests that passed, failed or were skipped.
        log: Name of the file with its output.
    """
    found = {name: FileResult(name, job.processes, log=log) for name in job.files}
    lines = report.read_text().splitlines() if report.exists() else []
    # A process that was killed may have written half of the last one.
    for row in (json.loads(line) for line in lines if line.endswith("}")):
        result = found.get(row["test"].partition("::")[0])
        if result is not None:
            result.count(row)
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


class _Running:
    """A job whose processes run.

    Args:
        job: What to run.
        number: Of no other job; names its files.
        devices: Of its GPUs; none: what this process sees.
        folder: For its output.
        limits: Of all jobs.
    """

    def __init__(
        self, job: Job, number: int, devices: Sequence[int], folder: Path, limits: Limits
    ) -> None:
        self.job, self.devices = job, devices
        first = Path(job.files[0])
        self.log = folder / f"{number:03d}-{first.parent.name}-{first.stem}.log"
        self.report = self.log.with_suffix(".jsonl")
        self.started = time.monotonic()
        self.killed = ""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command_of(job),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment_of(job, devices, folder, self.report, limits),
                preexec_fn=ends_with_this_process(),
            )

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self, reason: str) -> None:
        """With the processes that it has started: torchrun's ranks would go on."""
        self.killed = reason
        started = descendants(self._process.pid)
        self._process.kill()
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()

    def results(self) -> list[FileResult]:
        """After the end."""
        code = exit_code(self._process.returncode, self.log.read_text(errors="replace"))
        ended = self.killed
        if not ended and code not in (_PASSED, _FAILED, _NOTHING):
            ended = f"exit code {code}"
        found = results_of(self.job, self.report, ended, self.log.name)
        if code == _FAILED and not any(one.is_bad for one in found):
            found[-1].ended = f"exit code {code}, and no test of the first process failed"
        return found


def exit_code(code: int, log: str) -> int:
    """The code of the process that failed first, which torchrun reports and ends with 1."""
    first = re.search(r"^E\d{4} .*failed \(exitcode: (-?\d+)\)", log, re.MULTILINE)
    return int(first[1]) if first else code


def descendants(process: int) -> list[int]:
    """Ids of all processes that a process has started, and those have, by Linux's /proc."""
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


def command_of(job: Job) -> list[str]:
    """What runs a job's files."""
    launch = [sys.executable]
    if job.processes:
        launch += ["-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(job.processes)]
    options = ["-q", "--tb=short", "-p", "no:cacheprovider"]
    options += ["-o", f"faulthandler_timeout={_SLOW_TEST}"]
    options += [f"--deselect={test}" for test in job.left_out]
    return [*launch, "-m", "pytest", *options, *(job.tests or job.files)]


def environment_of(
    job: Job, devices: Sequence[int], folder: Path, report: Path, limits: Limits
) -> dict[str, str]:
    """Variables of a job's processes."""
    found = {
        **os.environ,
        "ABSORBED_MLA_TEST_REPORT": str(report),
        "ABSORBED_MLA_ERROR_TABLE": str(folder / "errors.jsonl"),
        "OMP_NUM_THREADS": "1",
        # Otherwise every process starts as many others as there are cores.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    if limits.memory_gib and not job.alone:
        found["ABSORBED_MLA_GPU_MEMORY_GIB"] = str(limits.memory_gib)
    if devices:
        # Of those that this process sees, which may have other names than their numbers.
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        seen = [names[one] if any(names) else str(one) for one in devices]
        found["CUDA_VISIBLE_DEVICES"] = ",".join(seen)
    return found


def run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    limits: Limits,
    devices: Sequence[int],
    say: Callable[[FileResult], None],
) -> list[FileResult]:
    """Run jobs in their order, and those that must be alone after the others.

    Args:
        jobs: The longest first.
        folder: For the output of each.
        limits: See there.
        devices: GPUs; none: jobs see what this process sees.
        say: Called with each result, when it is known.

    Returns:
        Results of all files, in the order of their ends.
    """
    end, numbers = time.monotonic() + limits.seconds, iter(range(1, len(jobs) + 1))
    running: list[_Running] = []
    results: list[FileResult] = []

    def take(found: list[FileResult]) -> None:
        for result in found:
            results.append(result)
            say(result)

    def start(job: Job) -> None:
        used = [device for one in running for device in one.devices]
        least_used = sorted(sorted(devices, key=used.count)[: job.gpus])
        running.append(_Running(job, next(numbers), least_used, folder, limits))

    def look_at(one: _Running, late: bool) -> None:
        seconds = time.monotonic() - one.started
        if not one.has_ended():
            if not late and seconds <= limits.job_seconds:
                return
            one.kill("not over in time" if late else f"killed after {seconds:.0f} s")
        running.remove(one)
        take(one.results())

    try:
        for alone, together in ((False, limits.jobs), (True, 1)):
            waiting = [job for job in jobs if job.alone is alone]
            while waiting or running:
                late = time.monotonic() > end
                while waiting and not late and len(running) < together:
                    start(waiting.pop(0))
                while waiting and late:
                    take(results_of(waiting.pop(0), folder / "none", "not started in time", ""))
                for one in list(running):
                    look_at(one, late)
                time.sleep(_POLL)
    finally:
        for one in running:
            one.kill("interrupted")
    return results
