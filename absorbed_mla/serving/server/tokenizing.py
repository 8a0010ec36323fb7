"""Threads in which prompts become token ids, beside the model's, which nobody may keep waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# Bytes of a request above which it has to wait for others like it, and short ones do not wait for
# it: a megabyte may take a second of a processor.
_LONG = 64 << 10
# Bytes of requests that may wait together.
_MOST_WAITING = 256 << 20


class TokenizingThreads:
    """Two threads: one for short requests, one for long ones.

    Tokenizers of Hugging Face's run without Python's lock.
    """

    def __init__(self) -> None:
        self._short, self._long = (
            ThreadPoolExecutor(1, thread_name_prefix=f"{name}-prompts")
            for name in ("short", "long")
        )
        self._waiting, self._lock = 0, threading.Lock()

    def submit(self, size: int, function: Callable[[], Any]) -> Future | None:
        """Call a function in one of the threads.

        Args:
            size: Bytes of its request.

        Returns:
            None if too many requests wait already.
        """
        with self._lock:
            if self._waiting + size > _MOST_WAITING:
                return None
            self._waiting += size
        future = (self._long if size > _LONG else self._short).submit(function)
        future.add_done_callback(lambda _: self._leave(size))
        return future

    def close(self) -> None:
        """Take no further functions; those that wait are still called."""
        for one in (self._short, self._long):
            one.shutdown(wait=False)

    def _leave(self, size: int) -> None:
        with self._lock:
            self._waiting -= size
