"""Remembering what was computed from an object, by the object itself instead of its value."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def cached_by_identity(
    function: Callable[..., _Result], maxsize: int = 64
) -> Callable[..., _Result]:
    """Cache ``function`` by the identity of its first argument and the value of the others.

    Spans of a pack are thousands of numbers, which layers hand on without changing; hashing them
    again in every layer would cost more than what is looked up.
    """
    # id -> (the object, so that no other one gets its id, and the result)
    known: OrderedDict[tuple, tuple[Any, _Result]] = OrderedDict()

    @functools.wraps(function)
    def cached(subject: Any, *others: Any) -> _Result:
        key = (id(subject), *others)
        if key in known:
            known.move_to_end(key)
        else:
            known[key] = (subject, function(subject, *others))
            if len(known) > maxsize:
                known.popitem(last=False)
        return known[key][1]

    return cached
