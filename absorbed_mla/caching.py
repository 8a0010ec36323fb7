"""Memoisation: what is computed from an object is kept on that object."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_RUN: ContextVar[object | None] = ContextVar("full_cuda_graph", default=None)


class DerivedTables:
    """What was computed from one object, by key; the object owns it and it ends with the object.

    A table of the sequences of a pack costs more to make than a layer takes to read it, and all
    layers read the same. Safe for several threads: autograd has its own.

    Args:
        maxsize: Results that are kept, the latest used ones.
    """

    def __init__(self, maxsize: int = 16) -> None:
        self._maxsize = maxsize
        self._results: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """The result kept under ``key``, made by ``make()`` where there is none."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                return self._results[key]
        # Outside of the lock: two threads may both compute, and get equal results.
        result = make()
        with self._lock:
            self._results[key] = result
            if len(self._results) > self._maxsize:
                self._results.popitem(last=False)
        return result


@contextlib.contextmanager
def full_cuda_graph() -> Iterator[None]:
    """Around all layers of one run of a step that a CUDA graph holds as a whole.

    They may share tables that the first of them makes: each replay makes them anew. In graphs of
    single layers each layer makes its own.
    """
    token = _RUN.set(object())
    try:
        yield
    finally:
        _RUN.reset(token)


def this_run() -> object | None:
    """What tells one run of a whole step from another; None outside of one."""
    return _RUN.get()
