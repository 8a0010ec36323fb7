"""The process that runs cases: it compiles what a configuration needs, then runs many cases."""

from __future__ import annotations

import os
import sys
import time
import warnings
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from checks.fuzz.case import CaseId, run_case
from checks.fuzz.family import Family, all_families

# Seconds for the cases behind the first one of a configuration, which compiles.
_MOST_SECONDS = 12.0
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
    """The GPU, or a CPU with Triton's interpreter; new memory is poisoned.

    Args:
        memory_share: Of the GPU's memory that this process may take.
    """
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

    Args:
        connection: Receives :class:`Batch` or None; sends :class:`Started`, an ``Outcome`` for it,
            and None behind a batch's last one.
        log: File for what this process writes to its output.
        memory_share: As in :func:`prepare_device`.
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
            end = min(end, time.monotonic() + _MOST_SECONDS)
