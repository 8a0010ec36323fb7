"""Processes that end when the one that started them does, even by SIGKILL. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: a child of a process with threads may not.
_LIBC = ctypes.CDLL(None, use_errno=True)


def ends_with_this_process() -> Callable[[], None]:
    """For ``subprocess.Popen(preexec_fn=...)``: the child is killed when this process ends.

    More exactly when the thread that starts it ends, which is to be one that waits for it.
    """
    parent = os.getpid()

    def bind() -> None:
        _bind(parent)

    return bind


def end_with_launcher() -> None:
    """Have this process killed when torchrun is; does nothing where torchrun did not start it.

    Anything else that started it may well end before it does, as a shell with nohup.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _bind(os.getppid())


def _bind(parent: int) -> None:
    prctl = getattr(_LIBC, "prctl", None)
    if prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # It may have ended before it was asked for.
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
