"""Works that are measured in turns, so that a change of the machine's speed meets all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from benchmarks.kit.lazy import lazy
from benchmarks.kit.report import Report, Times, reason
from benchmarks.kit.rows import Row
from benchmarks.kit.run import Benchmark
from benchmarks.kit.tables import markdown_table

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.kit.processes import Device

torch: Any = lazy("torch")
_TIMES = ("forward", "backward", "step", "host")
_HEAD = ("case", "work", *(f"{name} us" for name in _TIMES), "TB/s", "GiB", "difference")


@dataclass(frozen=True)
class Measured:
    """One work of a row, with its figures or with the error that prevented them."""

    name: str  # of the work
    error: str = ""  # empty, or why figures are missing
    forward: Times | None = None  # None after an error, as the next ones
    backward: Times | None = None  # likewise
    step: Times | None = None  # forward and backward
    host: Times | None = None  # seconds until the host had queued a step
    # Largest deviation of the first step's outputs from the first work's, divided by the largest
    # value; None if it has none to compare.
    difference: float | None = None
    # Read and written by forward; None where products take the time.
    forward_bytes: int | None = None
    backward_bytes: int | None = None  # likewise, by backward
    # The most that a step allocated beside what was there before; None on a CPU.
    peak_bytes: int | None = None

    def numbers(self) -> dict[str, float]:
        """Microseconds, TB/s and the difference, by name."""
        found: dict[str, float] = {}
        for name in ("forward", "backward", "step", "host"):
            times, moved = getattr(self, name), getattr(self, f"{name}_bytes", None)
            if times is not None:
                found[f"{name}_us"] = 1e6 * times.median
                if moved is not None:
                    found[f"{name}_tbps"] = moved / times.median / 1e12
        if self.difference is not None:
            found["difference"] = self.difference
        if self.peak_bytes is not None:
            found["peak_gib"] = self.peak_bytes / 2**30
        return found

    def cells(self) -> list[str]:
        """Of the table."""
        found = self.numbers()
        rates = [f"{found[key]:.2f}" for key in ("forward_tbps", "backward_tbps") if key in found]
        peak = f"{found['peak_gib']:.2f}" if "peak_gib" in found else ""
        difference = f"{found['difference']:.1e}" if "difference" in found else ""
        times = [f"{found[f'{name}_us']:.1f}" for name in _TIMES]
        return [*times, " / ".join(rates), peak, difference]


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Work:
    """A forward and its backward."""

    forward: Callable[[], Any] = _nothing  # returns what the others get
    backward: Callable[[Any], Any] = _nothing  # of all gradients
    # Tensors of a result, to compare; None if there are none.
    outputs: Callable[[Any], Sequence[Tensor]] | None = None
    finish: Callable[[], Any] = _nothing  # called after each step
    traffic: tuple[int, int] | None = None  # bytes that forward and backward read and write
    name: str = ""  # of the work
    error: str = ""  # why it cannot run


def attempts(builds: Mapping[str, Callable[[], Work]]) -> list[Work]:
    """What is built, by name; what it raises instead is the work's error."""
    works = []
    for name, build in builds.items():
        try:
            works.append(replace(build(), name=name))
        except Exception as problem:
            works.append(Work(name=name, error=reason(problem)))
    return works


@dataclass(frozen=True, kw_only=True)
class WorksRow(Row):
    """One case with its works, or with the error that prevented all of them."""

    works: list[Measured] = field(default_factory=list)


class WorksReport(Report):
    """One run."""

    row = WorksRow

    def figures(self, row: Any) -> dict[str, float]:
        """Of all works, by work and name."""
        numbers = ((work.name, work.numbers().items()) for work in row.works)
        return {f"{name} {what}": value for name, found in numbers for what, value in found}

    def line(self, row: Any) -> str:
        """A row in one line: the steps of its works."""
        steps = [f"{w.name} {w.numbers()['step_us']:.1f} us" for w in row.works if not w.error]
        return super().line(row) if row.error else f"{row.case}: {', '.join(steps)}"

    @classmethod
    def notes(cls, reports: Sequence[WorksReport]) -> list[str]:
        """A table of all works, and why some have no figures."""
        rows = [row for report in reports for row in report.measured]
        found = [(row.case, work) for row in rows for work in row.works]
        lines = [[str(case), w.name, *w.cells()] for case, w in found if not w.error]
        errors = [f"- {case}, {w.name}: {w.error}" for case, w in found if w.error]
        table = markdown_table(_HEAD, lines, ("case", "work")) if lines else ""
        return [table, "\n".join(errors)]


class WorksBenchmark(Benchmark):
    """Works of the same case in turns."""

    report = WorksReport

    def works(self, case: Any) -> list[Work]:
        """Of a case."""
        raise NotImplementedError

    def measure(self, case: Any) -> Any:
        """The works of a case."""
        assert self.processes is not None
        found = measure_together(self.works(case), self.processes, self.args.seconds_per_row)
        return self.report.row(case=case, works=found)


def measure_together(works: Sequence[Work], processes: Device, budget: float) -> list[Measured]:
    """Measure works in turns.

    Args:
        works: Of the same task.
        processes: For the device.
        budget: Seconds for the repetitions of all of them.
    """
    errors = {work.name: work.error for work in works if work.error}
    differences: dict[str, float | None] = {}
    peaks: dict[str, int | None] = {}
    expected: list[Tensor] | None = None
    for work in works:
        if work.error:
            continue
        try:
            # It compiles, and allocates what stays allocated.
            found = _first_step(work)
            processes.synchronize()
        except Exception as problem:
            errors[work.name] = reason(problem)
            continue
        expected = found if expected is None else expected
        differences[work.name] = _difference(found, expected)
        peaks[work.name] = _peak(work, processes) if processes.on_gpu else None
    running = [work for work in works if work.name not in errors]
    times = _times(running, processes, budget) if running else {}
    return [
        Measured(work.name, errors[work.name])
        if work.name in errors
        else Measured(
            work.name,
            "",
            *times[work.name],
            differences[work.name],
            *(work.traffic or (None, None)),
            peaks[work.name],
        )
        for work in works
    ]


def _first_step(work: Work) -> list[Tensor]:
    """A step's outputs, as they were before backward."""
    result = work.forward()
    outputs = [] if work.outputs is None else [x.detach().clone() for x in work.outputs(result)]
    work.backward(result)
    work.finish()
    return outputs


def _peak(work: Work, processes: Device) -> int:
    """Bytes that a step allocates at most."""
    processes.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work.backward(work.forward())
    work.finish()
    processes.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _difference(found: list[Tensor], expected: list[Tensor]) -> float | None:
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected)]
    return max((((a - b).abs().max() / b.abs().max()).item() for a, b in pairs), default=None)


def _times(works: Sequence[Work], processes: Device, budget: float) -> dict[str, tuple[Times, ...]]:
    """Forward, backward, step and the host's of every work."""
    from benchmarks.kit.timing import Repeated, host_seconds, in_turns, repetitions

    repeated = [
        Repeated(work.forward, work.backward, work.finish, on_gpu=processes.on_gpu)
        for work in works
    ]
    # A step of each, with the host's share, settles how many there is time for.
    host = host_seconds(repeated, 1)
    turn = sum(step for [(_, _, step)] in in_turns(repeated, 1, host))
    count = repetitions(turn, budget)
    host = host_seconds(repeated, min(count, 20))
    found = in_turns(repeated, count, host)
    return {
        work.name: (*(Times.of(part) for part in zip(*steps)), Times.of(of_host))
        for work, steps, of_host in zip(works, found, host)
    }
