"""Iterates over an export's tensors, collectively on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_conversion.formats.base import Entry, Part
from checkpoint_conversion.fp8 import SCALE_SUFFIX
from checkpoint_conversion.lazy_tensor import ReadSession


def started(parts: Sequence[Part], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """A started iterator over the tensors of all parts; every rank has to make one.

    Loading a tensor is collective. Before each part the ranks agree that all go on; one whose
    iterator is closed or dropped loads the rest of its part for the others first.
    """
    iterator = _iterate(parts, device)
    # Up to its first stop, because what has not started does not hear of being dropped.
    next(iterator)
    return iterator


def _iterate(parts: Sequence[Part], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    tensors: Iterator[tuple[str, Tensor]] = iter(())
    left = len(parts)
    try:
        yield "", torch.empty(0)
        for part in parts:
            _agree(True, device)
            left -= 1
            tensors = _tensors(part)
            yield from _handed_over(tensors)
    except GeneratorExit:
        for _ in tensors:
            pass
        if left:
            _agree(False, device)
        raise


def _handed_over(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same, but closing it does not close them."""
    for name, tensor in tensors:
        yield name, tensor
        # Not held any longer while the next one is gathered.
        del tensor


def _tensors(part: Part) -> Iterator[tuple[str, Tensor]]:
    for unit in _units(part.entries):
        # What a weight and its scales share is made once.
        with ReadSession() as session:
            for entry in unit:
                yield entry.key, entry.tensor.load(session).contiguous()


def _units(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Tensors, each with its scales, which follow it."""
    unit: list[Entry] = []
    for entry in entries:
        if unit and not entry.key.endswith(SCALE_SUFFIX):
            yield unit
            unit = []
        unit.append(entry)
    if unit:
        yield unit


def _agree(goes_on: bool, device: torch.device) -> None:
    """Tell the other ranks whether this one goes on.

    Raises:
        RuntimeError: If this rank would, but another does not.
    """
    if dist.get_world_size() == 1:
        return
    # The rank after the last one that leaves, 0 if none does.
    leaving = torch.tensor([0 if goes_on else dist.get_rank() + 1], device=device)
    dist.all_reduce(leaving, op=dist.ReduceOp.MAX)
    rank = int(leaving.item()) - 1
    if goes_on and rank >= 0:
        raise RuntimeError(
            f"rank {rank} has stopped iterating over hf_weights before its end; all ranks must go "
            "through all tensors, whether they need them or not"
        )
