"""Kill a process when its parent ends, even by SIGKILL. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: the child of a process with threads must not load libraries.
_LIBC = ctypes.CDLL(None, use_errno=True)


def ends_with_this_process() -> Callable[[], None]:
    """A function for ``subprocess.Popen(preexec_fn=...)``: kills the child when this process ends.

    Linux kills it already when the thread that started it ends, so that thread should wait for it.
    """
    parent = os.getpid()

    def bind() -> None:
        _bind(parent)

    return bind


def end_with_launcher() -> None:
    """Have this process killed when torchrun ends; does nothing without torchrun.

    Other parents may end before their child, as a shell with nohup does.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _bind(os.getppid())


def _bind(parent: int) -> None:
    prctl = getattr(_LIBC, "prctl", None)
    if prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # The parent may have ended before the call above.
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
