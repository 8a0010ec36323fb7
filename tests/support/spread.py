"""Tests of one process each, spread over processes that are forked when the tests are collected.

PyTorch, Megatron and the tests are imported once, and the fixtures of a module are set up once::

    python -m tests.support.spread 2 tests/unit

Only for machines without a GPU.
"""

import itertools
import multiprocessing.connection
import os
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from console.parent import ends_with_this_process
from tests.support import forked, ranks, report

# Set while tests share the cores with others.
VARIABLE = "ABSORBED_MLA_SPREAD"


class Spread:
    """A pytest plugin that forks processes, each of which takes the next module until none is left.

    This process prints and counts what they report.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        os.environ[VARIABLE] = str(processes)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if not session.items or session.testsfailed or session.config.option.collectonly:
            return None
        modules = [[*tests] for _, tests in itertools.groupby(session.items, lambda x: x.path)]
        modules.sort(key=len, reverse=True)  # the ends of all processes are close to each other
        queue, left = os.pipe()
        os.write(left, b"".join(number.to_bytes(4, "big") for number in range(len(modules))))
        os.close(left)
        workers: dict[Any, int] = {}
        while len(workers) < min(self._processes, len(modules)):
            ours, its = Pipe(duplex=False)
            bind = ends_with_this_process()
            pid = os.fork()
            if not pid:
                bind()
                ranks.take_own_output(session.config)
                report.leave_to(session.config, _Reports(session.config, its))
                _run(_taken(queue, modules))
                return True
            its.close()
            workers[ours] = pid
        _replay(session, workers)
        return True


def _taken(queue: int, modules: list[list[pytest.Item]]) -> Iterator[pytest.Item]:
    while number := os.read(queue, 4):
        yield from modules[int.from_bytes(number, "big")]


def _run(tests: Iterator[pytest.Item]) -> None:
    test = next(tests, None)
    while test:
        following = next(tests, None)
        test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        test = following


class _Reports:
    """Passes on what a test's process would print."""

    def __init__(self, config: pytest.Config, connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logstart(self, nodeid: str, location) -> None:
        self._connection.send(("logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook.pytest_report_to_serializable
        self._connection.send(("logreport", hook(config=self._config, report=report)))


def _replay(session: pytest.Session, workers: dict[Any, int]) -> None:
    config, running = session.config, dict.fromkeys(workers)
    while workers:
        for connection in multiprocessing.connection.wait([*workers]):
            try:
                kind, data = connection.recv()
            except EOFError:
                code = os.waitstatus_to_exitcode(os.waitpid(workers.pop(connection), 0)[1])
                if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                    config.hook.pytest_runtest_logreport(report=_ended(running[connection], code))
                continue
            if kind == "logstart":
                running[connection] = data
                config.hook.pytest_runtest_logstart(**data)
                continue
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            config.hook.pytest_runtest_logreport(report=report)


def _ended(test: dict[str, Any] | None, code: int) -> pytest.TestReport:
    """The report of a test with which its process ended."""
    test = test or {"nodeid": "before any test", "location": ("", None, "")}
    what = f"its process {forked.end_of(code)}" if code < 0 else f"its process exited with {code}"
    return pytest.TestReport(**test, keywords={}, outcome="failed", longrepr=what, when="teardown")


if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[2:], plugins=[Spread(int(sys.argv[1]))]))
