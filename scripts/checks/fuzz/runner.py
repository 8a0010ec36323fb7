"""Processes that run cases side by side, on one GPU."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch

from checks.fuzz.case import CaseId, Outcome, run_case
from checks.fuzz.family import Family, all_families
from checks.fuzz.results import Results

# Cases of a configuration. More of them would be cheap, fewer leave the time to the compiler.
_CASES = 16
# Seconds: of a case that compiles for long, and of cases under way when time is over.
_MOST_SECONDS, _GRACE = 240.0, 20.0
# What a configuration is expected to take, as long as it is not known.
_EXPECTED = 8.0
# Seconds between two reports of how far it is.
_REPORT = 20.0
# A process of its own has no CUDA context of its parent's.
_START = "spawn"
# Characters of a process's output that a report of its death quotes.
_QUOTED = 1500
# Seconds for the cases behind the first one of a configuration, which compiles.
_OTHERS = 12.0
# Failures after which a configuration is left.
_MOST_FAILURES = 2


class Batch(NamedTuple):
    """Cases of one configuration."""

    family: str  # name
    first: CaseId  # the first case; the others follow it
    cases: int  # how many, if time allows
    deadline: float  # by ``time.monotonic``, which all processes share; no case begins after it


class Started(NamedTuple):
    """A case has begun."""

    family: str
    case: CaseId


def prepare_device(memory_share: float | None = None) -> torch.device:
    """The GPU, or a CPU with Triton's interpreter; new memory is poisoned."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # cuBLAS's workspaces have one size, which deterministic algorithms ask for.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and memory_share is not None:
        torch.cuda.set_per_process_memory_fraction(memory_share)
    # Then ``torch.empty`` is full of NaN, or the largest integer: a side effect of deterministic
    # algorithms, which are asked for, but not required.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return device


def work(connection: Connection, log: str, memory_share: float) -> None:
    """Run batches until there are no more; says what begins and how it ended.

    The connection brings :class:`Batch` or None, and takes :class:`Started`, an ``Outcome`` for it,
    and None behind a batch's last one; the log gets what this process writes to its output.
    """
    with open(log, "wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    families, device = all_families(), prepare_device(memory_share)
    connection.send(None)
    while (batch := connection.recv()) is not None:
        _run_batch(batch, families[batch.family], device, connection)
        connection.send(None)


def _run_batch(batch: Batch, family: Family, device: torch.device, connection: Connection) -> None:
    failures, end = 0, batch.deadline
    for number in range(batch.first.number, batch.first.number + batch.cases):
        case = batch.first._replace(number=number)
        if time.monotonic() >= end or failures == _MOST_FAILURES:
            return
        connection.send(Started(family.name, case))
        outcome = run_case(family, case, device)
        connection.send(outcome)
        if outcome.fatal:
            os._exit(1)
        failures += outcome.error is not None
        if number == batch.first.number:
            end = min(end, time.monotonic() + _OTHERS)


class _Worker:
    """A process, what it is doing, and since when."""

    def __init__(self, number: int, folder: Path, memory_share: float) -> None:
        context = multiprocessing.get_context(_START)
        self.connection, theirs = context.Pipe()
        self.log = folder / f"{number}.txt"
        arguments = theirs, str(self.log), memory_share
        self.process = context.Process(target=work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.batch: Batch | None = None
        self.case: Started | None = None
        self.since = self.batch_since = time.monotonic()

    def give(self, batch: Batch) -> None:
        self.batch, self.batch_since = batch, time.monotonic()
        self.connection.send(batch)

    def output(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text[-_QUOTED:].strip()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class Runner:
    """Runs cases until time is over; every family gets its share of the workers' time.

    ``results`` gets what happens, and has the families; ``progress`` is called now and then.
    """

    def __init__(
        self,
        seed: int,
        seconds: float,
        jobs: int,
        results: Results,
        progress: Callable[[float], None],
    ) -> None:
        self.seed, self.seconds, self.jobs = seed, seconds, jobs
        self.results, self.progress = results, progress
        self.deadline = time.monotonic() + seconds
        self.started = 0
        # By family: seconds, those expected of batches under way included, and what was given out.
        self.spent: Counter[str] = Counter()
        self.configurations: Counter[str] = Counter()

    def run(self) -> None:
        """Until all processes have ended."""
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            workers = [self._start() for _ in range(self.jobs)]
            try:
                self._serve(workers)
            finally:
                for worker in workers:
                    worker.end()

    def _start(self) -> _Worker:
        self.started += 1
        return _Worker(self.started, self.folder, 0.7 / self.jobs)

    def _next(self) -> Batch:
        """The next configuration of the family that has had the least."""
        families = self.results.families
        name = min(families, key=lambda n: self.spent[n] / families[n].share)
        number = self.configurations[name]
        self.configurations[name] += 1
        self.spent[name] += _EXPECTED
        return Batch(name, CaseId(self.seed, number, 0), _CASES, self.deadline)

    def _serve(self, workers: list[_Worker]) -> None:
        reported = time.monotonic()
        while workers:
            by_connection = {worker.connection: worker for worker in workers}
            for connection in wait(list(by_connection), timeout=1.0):
                self._receive(by_connection[connection], workers)
            now = time.monotonic()
            for worker in list(workers):
                if worker.case is not None and now - worker.since > _MOST_SECONDS:
                    self._lost(worker, workers, f"took more than {_MOST_SECONDS:.0f} s")
            if now > self.deadline + _GRACE:
                self.results.unfinished += sum(worker.case is not None for worker in workers)
                return
            if now - reported > _REPORT:
                reported = now
                self.progress(self.seconds - (self.deadline - now))

    def _receive(self, worker: _Worker, workers: list[_Worker]) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            self._lost(worker, workers, f"ended its process, exit code {worker.process.exitcode}")
            return
        if isinstance(message, Started):
            worker.case, worker.since = message, time.monotonic()
        elif isinstance(message, Outcome):
            assert worker.case is not None
            self.results.add(*worker.case, message)
            worker.case = None
        else:  # it has done its batch, or has just started
            self._count(worker)
            if time.monotonic() < self.deadline:
                worker.give(self._next())
            else:
                workers.remove(worker)
                worker.end()

    def _count(self, worker: _Worker) -> None:
        """Put the time that the batch took in the place of what was expected."""
        if worker.batch is not None:
            self.spent[worker.batch.family] += time.monotonic() - worker.batch_since - _EXPECTED
            worker.batch = None

    def _lost(self, worker: _Worker, workers: list[_Worker], what: str) -> None:
        """A process is no more; its case has failed, and another process takes over."""
        self._count(worker)
        workers.remove(worker)
        worker.end()
        if worker.case is not None:
            error = f"the case {what}: {worker.output()}"
            seconds = time.monotonic() - worker.since
            self.results.add(*worker.case, Outcome(error, "not known", 0.0, (), seconds))
        elif not self.results.cases:
            raise OSError(f"a process {what} before it ran a case: {worker.output()}")
        if time.monotonic() < self.deadline:
            workers.append(self._start())
