"""The full CUDA graph of a step: whether the layers that run now belong to one, and to which run.

Layers of such a step may share tables that the first of them makes: each replay makes them anew. In
graphs of single layers each layer makes its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_RUN: ContextVar[object | None] = ContextVar("full_cuda_graph", default=None)


@contextlib.contextmanager
def full_cuda_graph() -> Iterator[None]:
    """Around all layers of one run of a step."""
    token = _RUN.set(object())
    try:
        yield
    finally:
        _RUN.reset(token)


def this_run() -> object | None:
    """What tells one run of a whole step from another; None outside of one."""
    return _RUN.get()
