"""Timing of repeated forwards and backwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.kit.lazy import lazy
from benchmarks.kit.report import Times

if TYPE_CHECKING:
    import torch

    from benchmarks.kit.processes import Processes
else:
    torch = lazy("torch")

LEAST_REPETITIONS, MOST_REPETITIONS = 3, 100
# At least those of a GPU.
_CYCLES_PER_SECOND = 2_000_000_000
# More than any L2 cache.
FLUSHED_BYTES = 256 * 2**20


def repetitions(seconds: float, budget: float) -> int:
    """How many steps of ``seconds`` fit ``budget`` seconds: 3 to 100, or 1 if one is longer."""
    if seconds > budget:
        return 1
    return max(LEAST_REPETITIONS, min(MOST_REPETITIONS, int(budget / seconds)))


class Repeated:
    """A forward and its backward, repeated for a number of seconds.

    On a GPU all repetitions are queued, with events between them, before the host waits for any:
    the host's own time counts only where the GPU has to wait for it.

    Args:
        forward: Returns what ``backward`` gets.
        backward: Its gradients; None to time forward only.
        finish: Called after each step, outside of the times; deletes gradients.
        on_gpu: Whether the work is a GPU's.
    """

    def __init__(
        self,
        forward: Callable[[], Any],
        backward: Callable[[Any], Any] | None = None,
        finish: Callable[[], Any] = lambda: None,
        *,
        on_gpu: bool,
    ) -> None:
        self.forward = forward
        self.backward = backward
        self.finish = finish
        self.on_gpu = on_gpu
        # Not looked up between the launches.
        self._event = torch.cuda.Event if on_gpu else None

    @classmethod
    def of(cls, subject: Any, *, on_gpu: bool) -> Repeated:
        """Of a ``kit.layers.Subject``, or what has its methods."""
        return cls(subject.forward, subject.backward, subject.forget_gradients, on_gpu=on_gpu)

    def once(self) -> float:
        """Seconds of one step."""
        return self.steps(1)[0][2]

    def times(self, seconds: float, budget: float) -> tuple[Times, Times | None, Times | None]:
        """Of forward, of backward and of both.

        Args:
            seconds: About how long one step takes.
            budget: Seconds for all repetitions.
        """
        forward, backward, step = zip(*self.steps(repetitions(seconds, budget)))
        if self.backward is None:
            return Times.of(forward), None, None
        return Times.of(forward), Times.of(backward), Times.of(step)

    def steps(self, count: int) -> list[tuple[float, float, float]]:
        """Seconds of forward, backward and both of every repetition."""
        return self.seconds_of([self.step() for _ in range(count)])

    def seconds_of(self, marks: list[tuple[Any, Any, Any]]) -> list[tuple[float, float, float]]:
        """Seconds of forward, backward and both, of the marks of every :meth:`step`."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return [(between(a, b), between(b, c), between(a, c)) for a, b, c in marks]

    def step(self) -> tuple[Any, Any, Any]:
        """Queue one repetition; returns marks of its beginning, its middle and its end."""
        begin = self._mark()
        result = self.forward()
        middle = self._mark()
        if self.backward is not None:
            self.backward(result)
        end = self._mark()
        self.finish()
        return begin, middle, end

    def _mark(self) -> Any:
        if self._event is None:
            return time.perf_counter()
        event = self._event(enable_timing=True)
        event.record()
        return event


def graphed(call: Callable[[], Any]) -> Callable[[], None]:
    """A call as a CUDA graph: what replays it.

    Raises:
        RuntimeError: If it cannot be recorded.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def flush_l2(device: torch.device) -> Callable[[], Any]:
    """What overwrites a GPU's L2 cache, between the times of two repetitions."""
    size = FLUSHED_BYTES if device.type == "cuda" else 1
    return torch.empty(size, dtype=torch.uint8, device=device).zero_


def repeat_together(
    repeated: Repeated, budget: float, processes: Processes
) -> tuple[list[float], list[float]]:
    """Repeat a step on all ranks, which begin each repetition together.

    Args:
        repeated: The step of this rank.
        budget: Seconds for all repetitions.
        processes: All ranks.

    Returns:
        The slowest rank's seconds of every forward, and of every forward and backward.
    """
    forward: list[float] = []
    step: list[float] = []
    wanted = 1
    while len(step) < wanted:
        [times] = processes.together(lambda: repeated.steps(1))
        slowest = processes.maximum([times[0], times[2]])
        forward.append(slowest[0])
        step.append(slowest[1])
        # Equal on all ranks, because the times are.
        wanted = max(wanted, repetitions(step[0], budget))
    return forward, step


def in_turns(works: Sequence[Repeated], count: int) -> list[list[tuple[float, float, float]]]:
    """Seconds of forward, backward and both of every repetition of each work, all in turns.

    So clocks and heat are alike; every other turn is in the opposite order. Before each turn a GPU
    is kept busy for as long as the host takes to queue it, so that the times are the GPU's also
    where the host is slower.

    Args:
        works: All on the same device.
        count: Repetitions of each.
    """
    on_gpu = works[0].on_gpu
    longest = max(sum(map(_host_seconds, works)) for _ in range(3))
    marks: list[list] = [[] for _ in works]
    for turn in range(count):
        if on_gpu:
            torch.cuda._sleep(int(longest * _CYCLES_PER_SECOND))
        for work, own in [*zip(works, marks)][:: -1 if turn % 2 else 1]:
            own.append(work.step())
    return [work.seconds_of(own) for work, own in zip(works, marks)]


def medians_in_turns(works: Sequence[Repeated], count: int) -> list[dict[str, float]]:
    """Medians in ms of each work, ``"step_ms"`` and ``"forward_ms"``; see :func:`in_turns`."""
    found = [[median(way) for way in zip(*times)] for times in in_turns(works, count)]
    return [{"step_ms": 1e3 * step, "forward_ms": 1e3 * forward} for forward, _, step in found]


def _host_seconds(work: Repeated) -> float:
    """The host's seconds of a step; a GPU is idle when it begins."""
    if work.on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work.step()
    return time.perf_counter() - begin


def between(begin: Any, end: Any) -> float:
    """Seconds."""
    if isinstance(begin, float):
        return end - begin
    return begin.elapsed_time(end) / 1e3


def ceilings(on_gpu: bool) -> dict[str, float]:
    """Rates that the device reaches: a bf16 (CPU: fp32) matrix product, and a copy.

    Returns:
        ``"matmul_tflops"`` and ``"copy_tbps"`` (bytes read and written).
    """
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    size, elements = (8192, 2**31) if on_gpu else (256, 2**22)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.randint(255, (elements,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    matmul = Repeated(lambda: torch.mm(left, right, out=product), on_gpu=on_gpu)
    copy = Repeated(lambda: target.copy_(source), on_gpu=on_gpu)
    seconds = []
    for work in (matmul, copy):
        work.once()
        seconds.append(work.times(work.once(), 0.3)[0].median)
    return {
        "matmul_tflops": 2 * size**3 / seconds[0] / 1e12,
        "copy_tbps": 2 * elements / seconds[1] / 1e12,
    }
