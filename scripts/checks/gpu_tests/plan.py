"""Processes that run test files, with the seconds that they are expected to take."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from checks.gpu_tests import selection

# Seconds of the tests of each file on an H100, by number of processes: what run_gpu_tests.sh wrote.
SECONDS = Path(__file__).with_name("seconds.json")
# To import PyTorch, Megatron and TransformerEngine, and to begin to use a GPU.
START = 15.0
# Of a file that SECONDS does not have.
_UNKNOWN = {"unit": 20.0, "distributed": 40.0}
# Of a test that takes most of a GPU's memory.
_LARGE = 10.0
# Files of fewer seconds are run by one process, together so many.
_SHORT, _TOGETHER = 12.0, 40.0


@dataclass(frozen=True)
class Job:
    """Test files that one command runs.

    Attributes:
        files: Paths below the root of the repository.
        processes: 0: one process of pytest; else so many, with torchrun.
        gpus: How many it sees.
        seconds: That it may take.
        alone: Whether nothing else may run on the GPUs meanwhile.
        tests: Ids of pytest of the tests that are run; none: all of the files.
        left_out: Ids, or how they begin, of tests of the files that other jobs run.
    """

    files: tuple[str, ...]
    processes: int
    gpus: int
    seconds: float
    alone: bool = False
    tests: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def jobs_of(root: Path, gpus: int, known: Mapping[str, float]) -> list[Job]:
    """All jobs of tests of so many GPUs, the longest first.

    Args:
        root: Of the repository.
        gpus: 1: ``tests/unit``, and ``tests/distributed`` with one process. More:
            ``tests/distributed`` with so many, and the unit tests that use several.
        known: Seconds by file.
    """
    if gpus == 1:
        unit = selection.unit_files(root)
    else:
        unit = selection.unit_files_of_several_gpus(root)
    jobs = [
        *_grouped(unit, 0, gpus, known),
        *_grouped(selection.distributed_files(root, gpus), gpus, gpus, known),
        *_large(unit, gpus),
    ]
    return sorted(jobs, key=lambda job: (job.alone, -job.seconds))


def shard_of(jobs: Sequence[Job], number: int, count: int) -> list[Job]:
    """One of ``count`` parts that take about equally long; numbers begin with 1."""
    parts: list[list[Job]] = [[] for _ in range(count)]
    for job in jobs:
        min(parts, key=lambda part: sum(one.seconds for one in part)).append(job)
    return parts[number - 1]


def known_seconds(gpus: int) -> dict[str, float]:
    """Seconds by file, as measured before with so many GPUs."""
    return json.loads(SECONDS.read_text()).get(str(gpus), {}) if SECONDS.exists() else {}


def _grouped(
    files: Iterable[str], processes: int, gpus: int, known: Mapping[str, float]
) -> list[Job]:
    jobs: list[Job] = []
    short: dict[str, list[str]] = {}  # by folder
    for name in files:
        seconds = _expected(name, known)
        if name in selection.ALONE or name in selection.DIVIDED or seconds >= _SHORT:
            jobs += _of_one_file(name, processes, gpus, seconds)
        else:
            short.setdefault(str(Path(name).parent), []).append(name)
    for names in short.values():
        jobs += _together(names, processes, gpus, known)
    return jobs


def _of_one_file(name: str, processes: int, gpus: int, seconds: float) -> list[Job]:
    """Jobs of a file's tests: one, or of equal seconds."""
    divided = [f"{name}::{test}" for test in selection.DIVIDED.get(name, ())]
    whole = Job((name,), processes, gpus, START + seconds / (1 + len(divided)))
    rest = replace(
        whole, alone=name in selection.ALONE, left_out=(*divided, *_large_tests_of([name]))
    )
    return [rest, *(replace(whole, tests=(test,)) for test in divided)]


def _large(files: Sequence[str], gpus: int) -> list[Job]:
    """The job of tests that take most of a GPU's memory."""
    tests = _large_tests_of(files)
    names = tuple(dict.fromkeys(test.partition("::")[0] for test in tests))
    return [Job(names, 0, gpus, START + _LARGE * len(tests), alone=True, tests=tests)] * bool(tests)


def _large_tests_of(files: Sequence[str]) -> tuple[str, ...]:
    return tuple(test for test in selection.LARGE if test.partition("::")[0] in files)


def _together(
    files: Sequence[str], processes: int, gpus: int, known: Mapping[str, float]
) -> list[Job]:
    jobs: list[Job] = []
    group: list[str] = []
    for name in [*files, None]:
        seconds = sum(_expected(one, known) for one in group)
        if group and (name is None or seconds + _expected(name, known) > _TOGETHER):
            left_out = _large_tests_of(group)
            jobs.append(Job(tuple(group), processes, gpus, START + seconds, left_out=left_out))
            group = []
        if name is not None:
            group.append(name)
    return jobs


def _expected(name: str, known: Mapping[str, float]) -> float:
    return known.get(name, _UNKNOWN["unit" if "/unit/" in name else "distributed"])
