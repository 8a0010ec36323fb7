"""Run a script: turn what goes wrong into one line and an exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from console.errors import follow_the_first, report
from console.parent import end_with_launcher
from console.ranks import local_rank

FAILED = 1
USER_ERROR = 2
INTERRUPTED = 130


class Failure(Exception):
    """The work was done, but its result misses what the options require."""


def run_script(script: str, work: Callable[[], int | None]) -> int:
    """Call ``work``, and report an error in one line.

    Args:
        script: Name of the program.
        work: The whole script, slow imports included; returns the exit code, None for 0.

    Returns:
        The exit code: that of ``work``; 2 for a ValueError, which is a mistake of the user; 1 if
        training diverged, the work ended with a :class:`Failure`, a file could not be read or
        written, or the reader of a pipe has closed it; 130 after Ctrl-C.
    """
    end_with_launcher()
    follow_the_first()
    try:
        with _no_stacks_on_signals():
            return work() or 0
    except BrokenPipeError:
        # As in "script.py | head -1".
        _discard_output()
        return FAILED
    except ValueError as error:
        return report(script, str(error), USER_ERROR)
    except (Failure, FloatingPointError, OSError) as error:
        return report(script, str(error), FAILED)
    except KeyboardInterrupt:
        if not local_rank():
            print(f"{script}: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def no_script(file: str, description: str | None) -> NoReturn:
    """Exit of a module that is started as if it were a script; 0 for ``--help``, else 2."""
    print(
        f"{description}\n\n{os.path.basename(file)} is no script: the scripts beside it import it."
    )
    sys.exit(0 if {"-h", "--help"} & set(sys.argv) else USER_ERROR)


def start(module: str) -> NoReturn:
    """Call ``main`` of a script's module with the command line, and exit with its code."""
    # A checkout runs without being installed; appended, so that an installed package wins.
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    # Megatron warns about every optional package it does not find.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    leave(importlib.import_module(module).main(sys.argv[1:]))


def leave(code: int) -> NoReturn:
    """Exit with ``code``.

    After an error exit handlers are skipped: they would wait for other ranks, which may be gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit(0)


@contextlib.contextmanager
def _no_stacks_on_signals() -> Iterator[None]:
    """Ignore requests to print stacks on Ctrl-C and SIGTERM; Megatron's inference makes them."""
    register = faulthandler.register

    def register_others(signum: int, *args, **options) -> None:
        if signum not in (signal.SIGINT, signal.SIGTERM):
            register(signum, *args, **options)

    faulthandler.register = register_others
    try:
        yield
    finally:
        faulthandler.register = register


def _discard_output() -> None:
    """Send further output nowhere, so that Python's flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
