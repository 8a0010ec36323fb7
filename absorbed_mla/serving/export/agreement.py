"""A step that all ranks prepare: results of each, or the error of any on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

Own = TypeVar("Own")
Sent = TypeVar("Sent")


def on_all_ranks(prepare: Callable[[], tuple[Own, Sent]]) -> tuple[Own, list[Sent]]:
    """Run a step on every rank and exchange a part of its result; collective.

    Args:
        prepare: Returns what this rank goes on with, and what all ranks get, which is pickled.

    Returns:
        The first, and the second of every rank.

    Raises:
        ValueError: On every rank, if ``prepare`` raises one on any: its own there, elsewhere one
            that names the rank.
    """
    own = sent = failure = None
    try:
        own, sent = prepare()
    except ValueError as error:
        failure = error
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, (sent, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    for rank, (_, message) in enumerate(found):
        if message is not None:
            raise ValueError(f"on rank {rank}: {message}")
    assert own is not None
    return own, [theirs for theirs, _ in found]
