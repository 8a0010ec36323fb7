"""Base class of benchmarks: from the command line to a JSON file, a plot and the terminal."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.kit import arguments, plot, provenance
from benchmarks.kit.report import Refused, Report, not_measured, reason
from console.parser import Parser
from console.ranks import rank
from console.script import run_script

if TYPE_CHECKING:
    from benchmarks.kit.processes import Processes


class Benchmark:
    """Cases, and how one is measured; what a case raises is the error of its row.

    ``--help`` begins with the docstring of its module.

    Args:
        args: From :meth:`parse`.

    Attributes:
        script: File name of the benchmark.
        files: Name of the JSON file and the plot in the folder; empty where ``--json`` and
            ``--plot`` name them.
        report: Type of the reports.
        errors: What a case may raise; anything else ends the benchmark.
        processes: Whose groups are left at the end; None if the benchmark needs none.
    """

    script: ClassVar[str]
    files: ClassVar[str] = ""
    report: ClassVar[type[Report]]
    errors: type[Exception] = Exception
    processes: Processes | None = None

    def __init__(self, args: argparse.Namespace) -> None:
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
        self.args = args
        # The case whose kernel made the device unusable.
        self._lost = ""

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """Add the options of this benchmark."""
        raise NotImplementedError

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """Check options that depend on each other; errors go to ``parser.error``."""

    def environment(self) -> dict:
        """What all cases have in common, from :func:`provenance.describe`."""
        raise NotImplementedError

    def cases(self) -> list:
        """In the order of measurement."""
        raise NotImplementedError

    def measure(self, case: Any) -> Any:
        """The row of one case, with figures."""
        raise NotImplementedError

    def exit_code(self, report: Report) -> int:
        """0, or 1 if the results are not what they must be."""
        return 0

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> argparse.Namespace:
        """The options, see :func:`arguments.parse`.

        Raises:
            ValueError: After wrong input.
        """
        # Not __doc__ in the body of the class, which is the class's own.
        parser = Parser(cls.script, sys.modules[cls.__module__].__doc__ or "")
        cls.add_options(parser)
        args = arguments.parse(parser, argv, cls.files)
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

        return run_script(cls.script, work)

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

    def rows(self) -> Iterator[Any]:
        """The rows of all cases."""
        return map(self.row, self.cases())

    def row(self, case: Any) -> Any:
        """The row of one case, with figures or an error."""
        import torch

        try:
            self._refuse()
            row = self.measure(case)
        except self.errors as error:
            row = self.failed(case, reason(error))
            # After an illegal access no call of this process succeeds any more.
            if isinstance(error, torch.AcceleratorError):
                self._lost = self._lost or str(case)
        # After the block that held the tensors of a failed case in its traceback.
        gc.collect()
        # It fails where the device is lost, which the next rows will say.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
        return row

    def failed(self, case: Any, error: str) -> Any:
        """The row of a case without figures."""
        return self.report.row(case=case, error=error)

    def _refuse(self) -> None:
        limit = getattr(self.args, "time_limit", float("inf"))
        if self._lost:
            raise Refused(f"left out: {self._lost} took the device away from this process")
        if time.monotonic() - self.args.begin > limit:
            raise Refused(f"left out: {limit:g} s are over (--time-limit)")


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
