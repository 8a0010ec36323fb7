"""Ranks of pytest as torchrun starts them, forked when the tests are collected."""

import os
import signal
import sys

import pytest

from console.parent import ends_with_this_process
from tests.support import report
from tests.support.forked import Job, exit_code, leave, of_the_job, start_store, wait


def run_tests(arguments: list[str], ranks: int) -> None:
    """Run pytest over ranks, and exit."""
    sys.exit(pytest.main(arguments, plugins=[Ranks(ranks)]))


class Ranks:
    """A pytest plugin that makes this process the ranks of a job once the tests are collected.

    They go on with the tests, and this process waits for them and ends.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        _, port = start_store()
        os.environ.update(of_the_job(ranks, port))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if not session.items or session.testsfailed or session.config.option.collectonly:
            return
        pids: list[int] = []
        while len(pids) < self._ranks:
            bind = ends_with_this_process()
            pids.append(os.fork())
            if not pids[-1]:
                bind()
                _become_rank(len(pids) - 1, session.config)
                return
        leave(lambda: sys.exit(exit_code(wait(pids, Job.grace, Job.timeout))))


def _become_rank(rank: int, config: pytest.Config) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    # Into a file that it does not share with the others.
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    if rank:
        report.only_failures(config)
