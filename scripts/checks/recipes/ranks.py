"""The processes of the job, and what they tell each other on the host."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from absorbed_mla.cpu_host import enable_cpu_host
from benchmarks.kit.command import ALONE
from tests.support import world


class Ranks:
    """All of torchrun's processes, or one alone; over NCCL where there are GPUs, else gloo.

    Errors and figures go over a gloo group, which does not involve the GPUs.
    """

    def __init__(self) -> None:
        for name, value in ALONE.items():
            os.environ.setdefault(name, value)
        self.on_gpu = not enable_cpu_host()
        world.start()
        self.size = dist.get_world_size()
        self._host_group = dist.new_group(backend="gloo")

    def first_error(self, error: str) -> str:
        """The first rank's error that has one; "" if no rank has."""
        named = [f"rank {rank}: {one}" for rank, one in enumerate(self.gathered(error)) if one]
        return named[0] if named else ""

    def gathered(self, value: object) -> list:
        """What every rank has."""
        values: list = [None] * self.size
        dist.all_gather_object(values, value, group=self._host_group)
        return values

    def synchronize(self) -> None:
        """Wait for the GPU, so that its errors are those of the work before."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def leave(self) -> None:
        """Leave all groups."""
        world.stop()
