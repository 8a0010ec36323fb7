"""Overlap of communication with computation: the time of NCCL kernels that others run in."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.kit.processes import CaseError, Processes

if TYPE_CHECKING:
    from benchmarks.kit.layers import Subject

Interval = tuple[float, float]
# The profiler also shows ranges that are no kernels, named like "nccl:_all_gather_base".
_COMMUNICATION = ("ncclDevKernel", "ncclKernel")
# Keeps the GPU busy while the host queues the step, as earlier work does in training; on an idle
# GPU every kernel would run alone, as soon as it is queued.
_BUSY_CYCLES = 400_000_000
_BUSY_KERNEL = "spin_kernel"


def overlap_fraction(function: Callable[[], object]) -> float | None:
    """Run ``function`` once under the profiler, on a GPU; see :func:`covered_fraction`."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda._sleep(_BUSY_CYCLES)
        function()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return covered_fraction(*kernels(events))


def least_overlaps(subject: Subject, processes: Processes) -> tuple[float | None, float | None]:
    """Least overlap fraction over the ranks, of a forward and of its backward."""
    outputs: list = []
    steps = (lambda: outputs.append(subject.forward()), lambda: subject.backward(outputs[0]))
    try:
        both = [processes.together(partial(overlap_fraction, step)) for step in steps]
    except CaseError as error:
        # The other figures of the case are still right.
        if processes.rank == 0:
            print(f"No overlap: {error}")
        return None, None
    # -1, below every fraction, stands for None, so that one rank's None makes the result None.
    least = processes.maximum([-(-1.0 if one is None else one) for one in both])
    forward, backward = (None if value == 1 else -value for value in least)
    return forward, backward


def kernels(events: Iterable[dict]) -> tuple[list[Interval], list[Interval]]:
    """NCCL's kernels and all others of a Chrome trace, as (start, end) in us."""
    communication: list[Interval] = []
    compute: list[Interval] = []
    for event in events:
        if event.get("cat") == "kernel" and _BUSY_KERNEL not in event["name"]:
            start = float(event["ts"])
            kind = communication if event["name"].startswith(_COMMUNICATION) else compute
            kind.append((start, start + float(event["dur"])))
    return communication, compute


def covered_fraction(these: Iterable[Interval], others: Iterable[Interval]) -> float | None:
    """The fraction of the time covered by ``these`` that ``others`` cover, too.

    None if ``these`` cover no time.

    Intervals of one kind may overlap each other; time counts once.
    """
    these, others = merged(these), merged(others)
    total = sum(end - start for start, end in these)
    common, first = 0.0, 0
    for start, end in these:
        while first < len(others) and others[first][1] <= start:
            first += 1
        for other_start, other_end in others[first:]:
            if other_start >= end:
                break
            common += min(end, other_end) - max(start, other_start)
    return common / total if total else None


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that are sorted and apart."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result
