"""From the command line to an exit code, for every script."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from console.last_words import follow_the_first, report
from console.parent import end_with_launcher
from console.ranks import local_rank

FAILED = 1
USER_ERROR = 2
INTERRUPTED = 130


class Failure(Exception):
    """Work that was done, with a result that is not what was asked for."""


def run_script(script: str, work: Callable[[], int | None]) -> int:
    """Do ``work``, with one line for what goes wrong.

    Args:
        script: Name of the program.
        work: Everything, imports that take long included; returns the exit code, None for 0.

    Returns:
        What ``work`` does; 2 after an error of the user's; 1 if training diverged, the result is
        not what was asked for, a file could not be read or written, or nobody reads the output any
        more; 130 after Ctrl-C.
    """
    end_with_launcher()
    follow_the_first()
    try:
        with _no_stacks_on_signals():
            return work() or 0
    except BrokenPipeError:
        # Whoever read the output has seen enough.
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
    """Say that a file was started that others import; 0 after ``--help``, 2 otherwise."""
    print(
        f"{description}\n\n{os.path.basename(file)} is no script: the scripts beside it import it."
    )
    sys.exit(0 if {"-h", "--help"} & set(sys.argv) else USER_ERROR)


def leave(code: int) -> NoReturn:
    """End the process.

    After an error or Ctrl-C at once: the interpreter's end would wait for other processes, which
    may never answer.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit(0)


@contextlib.contextmanager
def _no_stacks_on_signals() -> Iterator[None]:
    """Megatron's inference, when it is imported, asks for stacks on Ctrl-C and on termination."""
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
    """Keep Python from complaining when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
