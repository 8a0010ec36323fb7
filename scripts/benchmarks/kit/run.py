"""Base classes of benchmarks: from the command line to a JSON file, a plot and the terminal."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from benchmarks.kit import arguments, plot, provenance
from benchmarks.kit.lazy import lazy
from benchmarks.kit.report import Refused, Report, Times, not_measured, reason
from console.parser import Parser
from console.ranks import rank
from console.script import leave, run_script

if TYPE_CHECKING:
    import torch

    from benchmarks.kit.processes import Device
    from benchmarks.kit.timing import Repeated
else:
    torch = lazy("torch")


EPILOG = """
The file is written after every case. A case that cannot run or fails has the reason in its row, and
the others are measured. The last line of the output is JSON.
"""


class Benchmark:
    """Cases, and how one is measured; what a case raises is the error of its row.

    ``--help`` begins with the docstring of its module, whose file is the script.

    Args:
        args: From :meth:`parse`.

    Attributes:
        options: Of the command line, see ``arguments.add_options``.
        quick: More of the options of tiny cases on a CPU that ``--quick`` stands for.
        files: Name of the JSON file and the plot in the folder; empty where ``--json`` and
            ``--plot`` name them.
        report: Type of the reports.
        recorded: What the environment has: names of options, ``"dims"``, and ``"ceilings"``, the
            rates that the device reaches.
        strict: Whether a row with an error makes the exit code 1.
        errors: What a case may raise; anything else ends the benchmark.
        processes: Whose groups are left at the end; None if the benchmark needs none.
    """

    options: ClassVar[Mapping[str, Any]]
    quick: ClassVar[str]
    files: ClassVar[str] = ""
    report: ClassVar[type[Report]]
    recorded: ClassVar[tuple[str, ...]] = ()
    strict: ClassVar[bool] = False
    errors: type[Exception] = Exception
    processes: Device | None = None

    def __init__(self, args: argparse.Namespace) -> None:
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
        self.args = args
        # The case whose kernel made the device unusable.
        self._lost = ""
        if "device" in self.options:
            arguments.use_device(args.device)
        self.prepare()

    @classmethod
    def script(cls) -> str:
        """Name of the file."""
        return Path(sys.modules[cls.__module__].__file__ or "").name

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """Check options that depend on each other; errors go to ``parser.error``."""

    def prepare(self) -> None:
        """Make ready what all cases need: the processes."""
        from benchmarks.kit.processes import Processes

        self.processes = Processes(self.args.seed)

    def use_one_device(self) -> None:
        """Compute on a device without process groups."""
        from benchmarks.kit.processes import Device

        self.processes = Device(self.args.seed)
        self.device, self.on_gpu = self.processes.device, self.processes.on_gpu
        self.dtype = self.processes.dtype

    def interpret_on_cpu(self) -> None:
        """Have Triton's kernels interpreted where there is no GPU; before they are imported."""
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")

    def randoms(self) -> tuple[torch.Generator, Callable[..., torch.Tensor]]:
        """A new generator of --seed, and normal values of it, by shape."""
        make = torch.Generator(self.device).manual_seed(self.args.seed)
        return make, partial(torch.randn, device=self.device, dtype=self.dtype, generator=make)

    def environment(self) -> dict:
        """What all cases have in common, from :func:`provenance.describe`."""
        assert self.processes is not None
        return provenance.describe(self.processes.on_gpu, self.processes.dtype, **self.about())

    def about(self) -> dict:
        """What ``recorded`` names."""
        return {name: self._value(name) for name in self.recorded}

    def _value(self, name: str) -> Any:
        if name == "ceilings":
            from benchmarks.kit.timing import ceilings

            assert self.processes is not None
            return ceilings(self.processes.on_gpu)
        return arguments.dims_of(self.args) if name == "dims" else getattr(self.args, name)

    def cases(self) -> list:
        """In the order of measurement."""
        raise NotImplementedError

    def measure(self, case: Any) -> Any:
        """The row of one case, with figures."""
        raise NotImplementedError

    def exit_code(self, report: Report) -> int:
        """0, or 1 if the results are not what they must be."""
        return int(self.strict and any(row.error for row in report.rows))

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> argparse.Namespace:
        """The options, see :func:`arguments.parse`.

        Raises:
            ValueError: After wrong input.
        """
        # Not __doc__ in the body of the class, which is the class's own.
        parser = Parser(cls.script(), sys.modules[cls.__module__].__doc__ or "", EPILOG)
        arguments.add_options(parser, {**cls.options, "quick": False})
        given = arguments.quick(sys.argv[1:] if argv is None else argv, cls.options, cls.quick)
        args = arguments.parse(parser, given, cls.files)
        cls.check(parser, args)
        return args

    @classmethod
    def main(cls, argv: Sequence[str] | None = None) -> int:
        """Measure, or show the results that ``--render`` names.

        Returns:
            The exit code, 2 after wrong input.
        """

        def work() -> int:
            args = cls.parse(argv)
            return cls._show(args) if args.render else cls(args)._run()

        return run_script(cls.script(), work)

    @classmethod
    def _show(cls, args: argparse.Namespace) -> int:
        reports = [cls.report.read(file) for file in args.render]
        for report in reports:
            lines = (report.line(row) for row in report.measured)
            print("", provenance.sentence(report.environment), *lines, sep="\n")
        publish(reports, args)
        return 0

    def _run(self) -> int:
        report = self.report(self.environment())
        if rank():
            report.rows += self.rows()
        else:
            record(report, self.rows(), self.args)
            publish([report], self.args)
        # Last: a device that a kernel's fault took away may not answer.
        if self.processes is not None:
            self.processes.leave()
        return self.exit_code(report)

    def chosen(self) -> list:
        """The cases that ``--only`` leaves."""
        only = getattr(self.args, "only", None) or ""
        return [case for case in self.cases() if only in str(case)]

    def rows(self) -> Iterator[Any]:
        """The rows of all cases."""
        return map(self.row, self.chosen())

    def row(self, case: Any) -> Any:
        """The row of one case, with figures or an error."""
        try:
            self.require_device()
            row = self.measure(case)
        except self.errors as error:
            row = self.failed(case, error)
        self.clean()
        return row

    def failed(self, case: Any, error: Exception) -> Any:
        """The row of a case without figures."""
        # After an illegal access no call of this process succeeds any more.
        if isinstance(error, torch.AcceleratorError):
            self._lost = self._lost or str(case)
        return self.report.row(case=case, error=reason(error))

    def clean(self) -> None:
        """Free what the last case has left, after the block that had it in an error's traceback."""
        gc.collect()
        # It fails where the device is lost, which the next rows will say.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()

    def require_device(self) -> None:
        """Check that there are a device and time left.

        Raises:
            Refused: If not.
        """
        limit = getattr(self.args, "time_limit", float("inf"))
        if self._lost:
            raise Refused(f"left out: {self._lost} took the device away from this process")
        if time.monotonic() - self.args.begin > limit:
            raise Refused(f"left out: {limit:g} s are over (--time-limit)")


class InTurns(Benchmark):
    """Neighbouring cases with the same ``case.input`` are repeated in turns.

    What one of them raises is the error of its own row.

    Attributes:
        now: What belongs to the input at hand; forgotten after it.
    """

    now: SimpleNamespace

    def begin(self, case: Any) -> None:
        """Make ready what the cases of an input have in common, given the first of them."""

    def work(self, case: Any) -> tuple[Repeated, dict[str, Any]]:
        """What is repeated, after its result has been checked, and fields of the row.

        Raises:
            Refused: If it cannot run here.
        """
        raise NotImplementedError

    def count(self, works: Sequence[Repeated]) -> int:
        """How often each is repeated."""
        from benchmarks.kit.timing import repetitions

        seconds = sum(work.once() for work in works)
        return repetitions(seconds, self.args.seconds_per_row * len(works))

    def repeated(self, seconds: Mapping[Any, Sequence[float]]) -> Mapping[Any, dict[str, Any]]:
        """More fields of rows, by case, of works that took so long in every turn."""
        return {}

    def rows(self) -> Iterator[Any]:
        """The rows of all cases, input by input."""
        for _, cases in groupby(self.chosen(), key=lambda case: case.input):
            yield from self.together([*cases])

    def together(self, cases: Sequence[Any]) -> list[Any]:
        """The rows of the cases of one input."""
        self.now, rows = SimpleNamespace(), {}
        try:
            self.require_device()
            self.begin(cases[0])
            rows = self._measure(cases)
        except self.errors as error:
            rows |= {case: self.failed(case, error) for case in cases if case not in rows}
        self.now = SimpleNamespace()
        self.clean()
        return [rows[case] for case in cases]

    def _measure(self, cases: Sequence[Any]) -> dict[Any, Any]:
        from benchmarks.kit.timing import in_turns

        rows, works, fields = {}, {}, {}
        for case in cases:
            try:
                works[case], fields[case] = self.work(case)
            except self.errors as error:  # of any kernel; the others are measured all the same
                if isinstance(error, torch.AcceleratorError):
                    raise
                rows[case] = self.failed(case, error)
        if works:
            turns = in_turns([*works.values()], self.count([*works.values()]))
            seconds = {case: [step for _, _, step in own] for case, own in zip(works, turns)}
            more = self.repeated(seconds)
            for case, own in seconds.items():
                given = {"times": Times.of(own), **fields[case], **more.get(case, {})}
                rows[case] = self.report.row(case=case, **given)
        return rows


def main(benchmark: type[Benchmark]) -> NoReturn:
    """Run a benchmark, as its file does when it is started."""
    leave(benchmark.main())


def record(report: Report, rows: Iterable[Any], args: argparse.Namespace) -> None:
    """Add the rows to a report; write its file and print a line after each."""
    for row in rows:
        report.rows.append(row)
        if args.json:
            report.write(args.json)
        print(f"{time.monotonic() - args.begin:5.1f} s  {report.line(row)}", flush=True)


def publish(reports: Sequence[Report], args: argparse.Namespace) -> None:
    """Draw the plot, print the notes, the cases without figures, and a last line of JSON."""
    kind = type(reports[0])
    if args.plot and not plot.draw(kind.panels(reports), args.plot):
        print("No plot: matplotlib is missing, or nothing was measured.")
    for part in filter(None, [*kind.notes(reports), not_measured(reports)]):
        print(f"\n{part}")
    print(json.dumps([report.summary() for report in reports]), flush=True)
