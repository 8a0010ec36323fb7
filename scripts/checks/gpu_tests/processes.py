"""Runs jobs side by side, each in processes of its own, within a time limit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checks.gpu_tests.plan import Job
from checks.gpu_tests.results import FileResult, results_of
from console.parent import ends_with_this_process

_POLL = 0.1
# Return codes of pytest and torchrun: of tests that passed, that failed, of files that are skipped.
_PASSED, _FAILED, _NOTHING = 0, 1, 5
# A test that takes longer prints where its threads are.
_SLOW_TEST = 150


@dataclass(frozen=True)
class Limits:
    """What jobs may take.

    Attributes:
        jobs: How many run at the same time.
        job_seconds: A job that takes longer is killed.
        seconds: When all jobs are killed or not started, counted from the beginning.
        memory_gib: Of a GPU, that a process of a job that is not alone may allocate; 0: any.
    """

    jobs: int
    job_seconds: float
    seconds: float
    memory_gib: float


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
    return _Schedule(folder, limits, devices, say).run(jobs)


class _Schedule:
    def __init__(
        self,
        folder: Path,
        limits: Limits,
        devices: Sequence[int],
        say: Callable[[FileResult], None],
    ) -> None:
        self._folder, self._limits, self._devices, self._say = folder, limits, devices, say
        self._end = time.monotonic() + limits.seconds
        self._running: list[_Running] = []
        self._results: list[FileResult] = []
        self._started = 0

    def run(self, jobs: Sequence[Job]) -> list[FileResult]:
        try:
            self._run([job for job in jobs if not job.alone], self._limits.jobs)
            self._run([job for job in jobs if job.alone], 1)
        finally:
            for one in self._running:
                one.kill("interrupted")
        return self._results

    def _run(self, jobs: Sequence[Job], together: int) -> None:
        waiting = list(jobs)
        while waiting or self._running:
            late = time.monotonic() > self._end
            while waiting and not late and len(self._running) < together:
                self._start(waiting.pop(0))
            if late:
                for job in waiting:
                    self._take(results_of(job, self._folder / "none", "not started in time", ""))
                waiting = []
            for one in list(self._running):
                self._look_at(one, late)
            time.sleep(_POLL)

    def _start(self, job: Job) -> None:
        self._started += 1
        devices = self._least_used(job.gpus)
        self._running.append(_Running(job, self._started, devices, self._folder, self._limits))

    def _least_used(self, count: int) -> list[int]:
        used = [device for one in self._running for device in one.devices]
        return sorted(sorted(self._devices, key=used.count)[:count])

    def _look_at(self, one: _Running, late: bool) -> None:
        if not one.has_ended():
            seconds = time.monotonic() - one.started
            if late:
                one.kill("not over in time")
            elif seconds > self._limits.job_seconds:
                one.kill(f"killed after {seconds:.0f} s")
            else:
                return
        self._running.remove(one)
        self._take(one.results())

    def _take(self, results: list[FileResult]) -> None:
        for result in results:
            self._results.append(result)
            self._say(result)
