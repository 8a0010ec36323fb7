"""Whether what runs now is a whole step of a model that becomes one CUDA graph.

Layers of such a step may share tables that the first of them makes: each replay makes them anew. In
graphs of single layers each layer makes its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_RUN: ContextVar[object | None] = ContextVar("whole_step", default=None)


@contextlib.contextmanager
def whole_step() -> Iterator[None]:
    """Around all layers of one run of a step."""
    token = _RUN.set(object())
    try:
        yield
    finally:
        _RUN.reset(token)


def this_run() -> object | None:
    """What tells one run of a whole step from another; None outside of one."""
    return _RUN.get()
