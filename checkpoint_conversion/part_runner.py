"""Writing parts with several threads, within a bound on memory."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar


class HasPeak(Protocol):
    """Something to do that needs memory."""

    @property
    def peak(self) -> int:
        """Bytes resident while it is done."""


Work = TypeVar("Work", bound=HasPeak)
Written = TypeVar("Written")


class StoppedError(Exception):
    """Raised in a worker after another one has failed, or the user has interrupted."""


class MemoryBudget:
    """Bytes that several threads share.

    Args:
        limit: All of them. Whoever asks for more than that waits to be alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._stopped = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Wait for ``nbytes``, and give them back at the end.

        Raises:
            StoppedError: If the work has been stopped.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or not self._used or self._used + nbytes <= self._limit
            )
            self.check()
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()

    def stop(self) -> None:
        """Let everybody who waits or checks give up."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def check(self) -> None:
        """Return if the work goes on.

        Raises:
            StoppedError: If it has been stopped.
        """
        if self._stopped:
            raise StoppedError


def run_parts(
    parts: Sequence[Work],
    write: Callable[[Work], Written],
    budget: MemoryBudget,
    workers: int,
    written: Callable[[Written], None] = lambda result: None,
) -> None:
    """Call ``write`` for every part, in threads; the first error stops all of them.

    Args:
        parts: In the order in which they are begun.
        write: Writes one; calls ``budget.check`` now and then.
        budget: Their peaks are reserved from it.
        workers: Number of threads.
        written: Takes what ``write`` returned, when the part's memory is given back.
    """

    def one(part: Work) -> None:
        with budget.reserve(part.peak):
            result = write(part)
        written(result)

    with ThreadPoolExecutor(workers, thread_name_prefix="part") as pool:
        futures = [pool.submit(one, part) for part in parts]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # After success there is nothing left to stop.
            budget.stop()
            pool.shutdown(cancel_futures=True)
    errors = (future.exception() for future in futures if not future.cancelled())
    for error in errors:
        if error is not None and not isinstance(error, StoppedError):
            raise error


@contextlib.contextmanager
def file_errors(place: str) -> Iterator[None]:
    """Make every failure of the file system an ``OSError`` that says where it was.

    Args:
        place: What is being written.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = place
        raise
    except RuntimeError as error:
        if "inline_container" not in str(error):
            raise
        # torch.save's writer failed, because of a Python file, or of one that it opened itself.
        reason = error.__context__
        if isinstance(reason, OSError) and reason.errno is not None:
            raise OSError(reason.errno, reason.strerror, reason.filename or place) from error
        text = "torch could not write all of it; the disk may be full"
        raise OSError(errno.EIO, text, place) from error
