"""What ranks have together: a folder that all of them see, and tensors put together from shards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import world


@contextmanager
def shared_folder() -> Iterator[Path]:
    """An empty folder that all processes see."""
    name = [tempfile.mkdtemp(prefix="absorbed_mla_checkpoint_") if world.rank() == 0 else None]
    dist.broadcast_object_list(name)
    try:
        yield Path(name[0])
    finally:
        dist.barrier()
        if world.rank() == 0:
            shutil.rmtree(name[0])


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
