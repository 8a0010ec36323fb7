"""Remembering what was computed from an object, by the object itself instead of its value."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Function = Callable[..., _Result]


def cached_by_identity(maxsize: int) -> Callable[[_Function], _Function]:
    """Cache a function by the identity of its first argument and the value of the others.

    Spans of a pack are thousands of numbers, which layers hand on without changing; hashing them
    again in every layer would cost more than what is looked up. Safe for several threads: autograd
    has its own.

    Args:
        maxsize: Results that are kept, the latest used ones.
    """

    def decorate(function: _Function) -> _Function:
        # (id, others) -> (the object, so that no other one gets its id, and the result)
        known: OrderedDict[tuple, tuple[Any, Any]] = OrderedDict()
        lock = threading.Lock()

        @functools.wraps(function)
        def cached(subject: Any, *others: Any) -> Any:
            key = (id(subject), *others)
            with lock:
                found = known.get(key)
                if found is not None:
                    known.move_to_end(key)
                    return found[1]
            # Outside of the lock: two threads may both compute, and get the same.
            result = function(subject, *others)
            with lock:
                known[key] = (subject, result)
                if len(known) > maxsize:
                    known.popitem(last=False)
            return result

        return cached

    return decorate
