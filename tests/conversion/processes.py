"""The command line in processes of its own, which can be killed at a chosen step or any moment.

They are forked from a process that has loaded torch already, so that each starts in milliseconds.
"""

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from checkpoint_conversion.cli import main

_CONTEXT = multiprocessing.get_context("forkserver")
# Readers and writers are imported when a format is asked for, and torch's own take a second.
_LOADED = ("convert", "formats.hugging_face", "formats.torch_dist", "formats.torch_dist_writer")
_CONTEXT.set_forkserver_preload([*(f"checkpoint_conversion.{name}" for name in _LOADED), __name__])
# What changes names on the disk or waits for it: between any two of them a kill can leave
# something new.
_STEPS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "ftruncate", "truncate")


@dataclass(frozen=True)
class Done:
    """How a process ended.

    Attributes:
        code: Its exit code; negative if a signal ended it.
        out: What it printed.
        err: Its messages.
        steps: System calls of the kinds of ``_STEPS`` that it made, if it lived to tell.
    """

    code: int
    out: str
    err: str
    steps: int


class Process:
    """``absorbed-mla-convert ARGS...``, started.

    Args:
        folder: For its output; empty.
        args: The command line.
        kill_at: The step before which it kills itself; None lives.
        by: The signal by which it does.
        largest_file: Bytes beyond which no file can grow.
    """

    def __init__(
        self,
        folder: Path,
        *args: object,
        kill_at: int | None = None,
        by: signal.Signals = signal.SIGKILL,
        largest_file: int | None = None,
    ) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        arguments = (folder, [str(arg) for arg in args], kill_at, by, largest_file)
        self._process = _CONTEXT.Process(target=_run, args=arguments)
        self._process.start()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def wait(self) -> Done:
        self._process.join(120)
        code = self._process.exitcode
        assert code is not None, "it hangs"
        files = (self._folder / name for name in ("out", "err", "steps"))
        out, err, steps = (file.read_text() if file.exists() else "" for file in files)
        return Done(code, out, err, int(steps or 0))


def run(folder: Path, *args: object, **how) -> Done:
    """Start a process and wait for it; see :class:`Process`."""
    return Process(folder, *args, **how).wait()


def _run(folder: Path, args: list[str], kill_at: int | None, by: int, limit: int | None) -> None:
    # What a shell starts in the background is told to ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with _output(folder), _counted_steps(kill_at, by) as steps:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            code = main(args)
        except SystemExit as error:
            code = int(error.code or 0)
    (folder / "steps").write_text(str(steps[0]))
    sys.exit(code)


@contextmanager
def _output(folder: Path) -> Iterator[None]:
    with (folder / "out").open("w") as sys.stdout, (folder / "err").open("w") as sys.stderr:
        yield
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


@contextmanager
def _counted_steps(kill_at: int | None, by: signal.Signals) -> Iterator[list[int]]:
    steps = [0]

    def counted(call):
        def step(*args, **kwargs):
            steps[0] += 1
            if steps[0] == kill_at:
                os.kill(os.getpid(), by)
            return call(*args, **kwargs)

        return step

    originals = {name: getattr(os, name) for name in _STEPS}
    for name, call in originals.items():
        setattr(os, name, counted(call))
    yield steps
    for name, call in originals.items():
        setattr(os, name, call)
