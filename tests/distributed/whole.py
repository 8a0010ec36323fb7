"""What ranks have together: a folder that all see, results of one or of all, whole tensors."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import world


@contextmanager
def shared_folder() -> Iterator[Path]:
    """An empty folder that all processes see."""
    name = on_one_rank(lambda: tempfile.mkdtemp(prefix="absorbed_mla_checkpoint_"))
    try:
        yield Path(name)
    finally:
        dist.barrier()
        if world.rank() == 0:
            shutil.rmtree(name)


def on_one_rank(function: Callable[[], Any]) -> Any:
    """What ``function`` returns on the first rank, on all of them once it has ended there."""
    box = [function() if world.rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def of_all_ranks(value: Any) -> list:
    """By rank."""
    found = [None] * world.size()
    dist.all_gather_object(found, value)
    return found


def whole_tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Every tensor over all tensor-parallel ranks, where it is: on the device or on the host."""
    whole = {}
    for name, tensor in named:
        if getattr(tensor, "tensor_model_parallel", False):
            # Each rank has its rows of the gate above its rows of the up part.
            parts = tensor.chunk(2) if name.endswith("linear_fc1.weight") else [tensor]
            tensor = torch.cat([_gathered(part, tensor.partition_dim) for part in parts])
        whole[name] = tensor
    return whole


def _gathered(x: Tensor, dim: int) -> Tensor:
    """Every tensor-parallel rank's ``x``, one after the other along ``dim``."""
    return world.gather(x.detach().to(world.device()), dim).to(x.device)
