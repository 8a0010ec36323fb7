"""A fair lock around a model that several threads call, and the deferral of Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class FairLock:
    """A lock that threads get in the order in which they ask; its owner may take it again."""

    def __init__(self) -> None:
        self._waiting, self._held = threading.Lock(), threading.RLock()

    def __enter__(self) -> None:
        # The owner asks again where Python closes an abandoned generator meanwhile.
        if self._held._is_owned():  # type: ignore[attr-defined]
            self._held.acquire()
            return
        try:
            # Who has just released it must wait behind the thread that holds the first one.
            with self._waiting:
                self._held.acquire()
        except BaseException:
            # A second Ctrl-C, which may come when this thread has it already.
            if self._held._is_owned():  # type: ignore[attr-defined]
                self._held.release()
            raise

    def __exit__(self, *_) -> None:
        self._held.release()


class _Deferred:
    """A handler of SIGINT that calls the one before it later, and the second time at once."""

    def __init__(self, before: Callable) -> None:
        self.before = before
        self.received: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self.before(number, frame)
        self.received = number, frame


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C (SIGINT) waits until the block has ended; a second one does not.

    So that an exchange with other processes is not cut in half. In other threads than the main one,
    which get no signals, nothing happens.
    """
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not callable(before) or isinstance(before, _Deferred):
        yield
        return
    handler = _Deferred(before)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if handler.received is not None:
            before(*handler.received)
