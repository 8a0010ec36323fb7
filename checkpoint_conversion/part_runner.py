"""Multi-threaded writing of a checkpoint's parts within a memory budget, committed to disk."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Generic, Protocol, TypeVar


class HasPeak(Protocol):
    """A piece of work with a known memory need."""

    @property
    def peak(self) -> int:
        """Bytes of resident memory needed meanwhile."""


Work = TypeVar("Work", bound=HasPeak)
Written = TypeVar("Written")


class StoppedError(Exception):
    """Raised in a worker when another one has failed or the user has interrupted."""


class MemoryBudget:
    """A number of bytes that threads reserve from.

    Args:
        limit: The whole budget. A larger reservation is granted when nothing else is reserved.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._stopped = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Wait until ``nbytes`` are free, and hold them within the context.

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
        """Make every waiting or checking thread raise :class:`StoppedError`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def check(self) -> None:
        """Do nothing unless the work has been stopped.

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
        parts: The parts, in the order in which they are started.
        write: Writes one part; calls ``budget.check`` now and then.
        budget: Each part's peak is reserved from it while the part is written.
        workers: Number of threads.
        written: Called with the result of ``write`` after the part's memory is released.
    """

    def one(part: Work) -> None:
        try:
            with budget.reserve(part.peak):
                result = write(part)
            written(result)
        except BaseException:
            # At once, not only when the waiting thread has heard of it.
            budget.stop()
            raise

    with ThreadPoolExecutor(workers, thread_name_prefix="part") as pool:
        futures = [pool.submit(one, part) for part in parts]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # Stops the remaining parts after a failure; after success there are none.
            budget.stop()
            pool.shutdown(cancel_futures=True)
    errors = (future.exception() for future in futures if not future.cancelled())
    for error in errors:
        if error is not None and not isinstance(error, StoppedError):
            raise error


@contextlib.contextmanager
def file_errors(place: str) -> Iterator[None]:
    """Make every failure of the file system an ``OSError`` with a file name, else ``place``."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = place
        raise
    except RuntimeError as error:
        if "inline_container" not in str(error):
            raise
        # torch.save failed; the reason is known only if Python had opened the file.
        reason = error.__context__
        if isinstance(reason, OSError) and reason.errno is not None:
            raise OSError(reason.errno, reason.strerror, reason.filename or place) from error
        text = "torch could not write all of it; the disk may be full"
        raise OSError(errno.EIO, text, place) from error


class Committer(Generic[Written]):
    """Syncs written parts to disk and records them; its context ends when all are committed.

    Syncing needs no memory of the budget, so it runs in parallel with the writing of other parts.
    Parts that were written during one sync are committed together in the next.

    Args:
        commit: Syncs parts to disk, then records them.
        failed: Called once if ``commit`` fails; nothing is committed afterwards.
        beside: Commit in a separate thread; otherwise in :meth:`submit`.
    """

    def __init__(
        self,
        commit: Callable[[list[Written]], None],
        failed: Callable[[], None],
        beside: bool = True,
    ) -> None:
        self._commit, self._failed = commit, failed
        self._waiting: list[Written] = []
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="commit") if beside else None

    def submit(self, written: Written) -> None:
        """Queue a written part for the commit; thread-safe."""
        if self._thread is None:
            self._commit([written])
            return
        with self._changed:
            self._waiting.append(written)
            self._changed.notify()

    def __enter__(self) -> Committer[Written]:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._thread is None:
            return
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        # An error of the writing came first, and is the one to raise.
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                written, self._waiting = self._waiting, []
            try:
                self._commit(written)
            except BaseException as error:
                self._error = error
                self._failed()
                return


def resident() -> int:
    """Bytes of this process that are resident now; 0 where there is no ``/proc``."""
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident() -> int:
    """Bytes of this process that were resident at most."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Without /proc. On Linux this would include the peak of the parent process before exec.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
