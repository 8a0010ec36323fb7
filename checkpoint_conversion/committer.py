"""Waiting for the disk beside the writing of other parts, for several parts at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Written = TypeVar("Written")


class Committer(Generic[Written]):
    """Makes written parts durable and records them; a context manager that waits for all of them.

    Waiting needs no memory of ours, so parts that are written do not wait for it. What has
    been written while the disk was busy is committed together.

    Args:
        commit: Makes parts durable, then records them.
        failed: Called once, when ``commit`` has failed; nothing is committed afterwards.
        beside: Commit in a thread of its own; otherwise :meth:`submit` does it.
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
        """Hand over a part; threads may call it."""
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
        # The first error of the writing is the one to be raised.
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
