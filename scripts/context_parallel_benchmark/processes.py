"""Processes, one of which fails as all do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from absorbed_mla.testing.cpu_host import enable_cpu_host


class Processes:
    """All of torchrun's processes as one context-parallel group.

    What they agree on goes over a gloo group of its own, which is no matter of the GPUs.

    Args:
        seed: Of the weights and inputs.
        timeout: Seconds after which a collective that some rank did not join is an error.
    """

    def __init__(self, seed: int, timeout: float) -> None:
        self.device = torch.device("cpu")
        if not enable_cpu_host():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        self.on_gpu = self.device.type == "cuda"
        limit = timedelta(seconds=timeout)
        dist.init_process_group("nccl" if self.on_gpu else "gloo", timeout=limit)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Longer: one rank may wait here for another that waits in vain elsewhere.
        self._host_group = dist.new_group(backend="gloo", timeout=4 * limit)
        parallel_state.initialize_model_parallel(context_parallel_size=self.size)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self._generator = torch.Generator(self.device).manual_seed(seed + self.rank)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Each value's largest over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._host_group)
        return tensor.tolist()

    def first_error(self, error: str) -> str:
        """The first rank's error that has one; "" if no rank has."""
        errors: list[str | None] = [None] * self.size
        dist.all_gather_object(errors, error, group=self._host_group)
        named = [f"rank {rank}: {one}" for rank, one in enumerate(errors) if one]
        return named[0] if named else ""

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """Wait for the GPU and for all ranks."""
        self.synchronize()
        dist.barrier(group=self._host_group)

    def random(self, *shape: int) -> Tensor:
        """Normal values; every call's and every rank's differ."""
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=self.dtype)

    def leave(self) -> None:
        """Leave all groups."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
