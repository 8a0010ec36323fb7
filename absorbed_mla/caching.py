"""Memoisation: what is computed from an object is kept on that object."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


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
