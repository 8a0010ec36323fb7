"""Time, memory, traffic and overlap of one case, on all ranks together."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from absorbed_mla.testing.traffic import Traffic, count_traffic
from chosen_backends import ChosenBackends
from context_parallel_benchmark.arguments import Case
from context_parallel_benchmark.layers import Subject, build
from context_parallel_benchmark.overlap import overlap_fraction
from context_parallel_benchmark.processes import Processes
from context_parallel_benchmark.row import Row

LEAST_REPETITIONS, MOST_REPETITIONS = 3, 100

_Result = TypeVar("_Result")


class CaseError(Exception):
    """A case that failed on some rank, raised on all of them."""


@dataclass(frozen=True)
class Observed:
    """One step that was not timed; bytes are None without a GPU."""

    forward: Traffic
    backward: Traffic
    kept_bytes: int | None
    peak_bytes: int | None


def measure(case: Case, args: argparse.Namespace, processes: Processes) -> Row:
    """Measure one case; of a case that fails on any rank, every rank has the error in its row."""
    try:
        return _measure(case, args, processes)
    except CaseError as error:
        return Row(case=case, cp_size=processes.size, error=str(error))
    finally:
        gc.collect()
        if processes.on_gpu:
            torch.cuda.empty_cache()


def _measure(case: Case, args: argparse.Namespace, processes: Processes) -> Row:
    subject = _together(processes, lambda: build(case, args, processes))
    ran = ChosenBackends(subject.layer)
    for _ in range(args.warmup):
        _together(processes, lambda: _timed_step(subject, processes))
    observed = _together(processes, lambda: observe(subject, processes))
    forward, step = _repeat(subject, args.seconds_per_row, processes)
    overlaps: tuple[float | None, float | None] = (None, None)
    if args.profile and processes.on_gpu and case.implementation == "ours":
        overlaps = _overlaps(subject, processes)
    sent = [observed.forward.num_bytes, observed.backward.num_bytes]
    forward_sent, backward_sent = map(int, processes.maximum(sent))
    return Row(
        case=case,
        cp_size=processes.size,
        forward_seconds=forward,
        step_seconds=step,
        kept_bytes=_largest(observed.kept_bytes, processes),
        peak_bytes=_largest(observed.peak_bytes, processes),
        forward_sent_bytes=forward_sent,
        backward_sent_bytes=backward_sent,
        traffic={
            "forward": observed.forward.breakdown(),
            "backward": observed.backward.breakdown(),
        },
        forward_overlap=overlaps[0],
        backward_overlap=overlaps[1],
        ran=str(ran),
    )


def _together(processes: Processes, function: Callable[[], _Result]) -> _Result:
    """``function``'s result if it succeeds on all ranks, which begin together.

    ``function`` must leave it to this to wait for other ranks, or they would miss each other after
    an error. A rank that fails while others are in a collective leaves them to its timeout.

    Raises:
        CaseError: On every rank if it fails on any.
    """
    result, error = None, ""
    processes.meet()
    try:
        result = function()
        processes.synchronize()
    except Exception as problem:
        # As text: a traceback would keep the tensors alive that memory is short of.
        error = f"{type(problem).__name__}: {problem}"
    first = processes.first_error(error)
    if first:
        raise CaseError(first)
    return result  # type: ignore[return-value]


def observe(subject: Subject, processes: Processes) -> Observed:
    """Run one step for its traffic and memory; before and afterwards there are no gradients."""
    on_gpu = processes.on_gpu
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with count_traffic() as forward:
        output = subject.forward()
    kept = torch.cuda.memory_allocated() - before if on_gpu else None
    with count_traffic() as backward:
        subject.backward(output)
    processes.synchronize()
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
    subject.forget_gradients()
    return Observed(forward, backward, kept, peak)


def repetitions(seconds: float, budget: float) -> int:
    """How many steps of ``seconds`` to time: for ``budget`` seconds, within limits."""
    if seconds > budget:
        return 1
    return max(LEAST_REPETITIONS, min(MOST_REPETITIONS, int(budget / seconds)))


def _repeat(
    subject: Subject, budget: float, processes: Processes
) -> tuple[list[float], list[float]]:
    """Seconds of every forward, and of every forward and backward, the slowest rank's."""
    forward: list[float] = []
    step: list[float] = []
    count = 1
    while len(step) < count:
        times = _together(processes, lambda: _timed_step(subject, processes))
        slowest = processes.maximum(list(times))
        forward.append(slowest[0])
        step.append(slowest[1])
        # All ranks know the same times, and so the same count.
        count = max(count, repetitions(step[0], budget))
    return forward, step


def _timed_step(subject: Subject, processes: Processes) -> tuple[float, float]:
    """Seconds of forward, and of forward and backward; afterwards there are no gradients."""
    clock = _GPUClock() if processes.on_gpu else _CPUClock()
    clock.mark()
    output = subject.forward()
    clock.mark()
    subject.backward(output)
    clock.mark()
    subject.forget_gradients()
    return clock.since_first(1), clock.since_first(2)


def _overlaps(subject: Subject, processes: Processes) -> tuple[float | None, float | None]:
    """Least overlap over the ranks, of a forward and of its backward."""
    outputs: list[torch.Tensor] = []
    steps = (lambda: outputs.append(subject.forward()), lambda: subject.backward(outputs[0]))
    try:
        both = [_together(processes, partial(overlap_fraction, step)) for step in steps]
    except CaseError as error:
        # A profiler that fails takes no other figure with it.
        if processes.rank == 0:
            print(f"No overlap: {error}")
        return None, None
    # Below every fraction, so that one rank without is found.
    least = processes.maximum([-(-1.0 if one is None else one) for one in both])
    forward, backward = (None if value == 1 else -value for value in least)
    return forward, backward


def _largest(value: int | None, processes: Processes) -> int | None:
    return None if value is None else int(processes.maximum([value])[0])


class _GPUClock:
    """Marks on the current stream."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def since_first(self, mark: int) -> float:
        torch.cuda.synchronize()
        return self._events[0].elapsed_time(self._events[mark]) / 1e3


class _CPUClock:
    """Marks in time."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def mark(self) -> None:
        self._times.append(time.perf_counter())

    def since_first(self, mark: int) -> float:
        return self._times[mark] - self._times[0]
