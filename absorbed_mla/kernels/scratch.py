"""Uninitialised scratch memory that a kernel writes and nobody is given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def not_filled() -> Iterator[None]:
    """Within, deterministic algorithms do not fill new tensors with NaN.

    To fill large scratch memory would take a part of the time that its use takes.
    """
    options = torch.utils.deterministic
    before = options.fill_uninitialized_memory
    options.fill_uninitialized_memory = False
    try:
        yield
    finally:
        options.fill_uninitialized_memory = before
