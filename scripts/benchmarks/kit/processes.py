"""The processes of a benchmark: one, or all of torchrun's as a context-parallel group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from absorbed_mla.cpu_host import enable_cpu_host
from benchmarks.kit.command import ALONE
from benchmarks.kit.report import Refused, reason

_Result = TypeVar("_Result")
CPU = torch.device("cpu")


class CaseError(Refused):
    """A case that failed on some rank, raised on all of them."""


class Device:
    """What a benchmark of one process without groups computes on.

    Args:
        seed: Of the inputs.
    """

    def __init__(self, seed: int) -> None:
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else CPU
        self._generator = torch.Generator(self.device)
        self.rank, self.size = 0, 1
        self.reseed(seed)

    @property
    def on_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def reseed(self, seed: int) -> None:
        """Begin anew with the values of :meth:`random`."""
        self._generator.manual_seed(seed + self.rank)

    def random(self, *shape: int) -> Tensor:
        """Normal values; every call's and every rank's differ."""
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=self.dtype)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def leave(self) -> None:
        """Leave all groups."""


class Processes(Device):
    """All of torchrun's processes as one context-parallel group; one process without torchrun.

    The ranks exchange errors and times over a gloo group, which does not involve the GPUs.

    Args:
        seed: Of the weights and inputs.
        timeout: Seconds after which a collective that some rank did not join is an error.
    """

    def __init__(self, seed: int, timeout: float = 120.0) -> None:
        for name, value in ALONE.items():
            os.environ.setdefault(name, value)
        self.device = CPU
        if not enable_cpu_host():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("nccl" if self.on_gpu else "gloo", timeout=limit)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Longer: a rank may wait here for another one whose collective runs into its timeout.
        self._host_group = dist.new_group(backend="gloo", timeout=4 * limit)
        parallel_state.initialize_model_parallel(context_parallel_size=self.size)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self._generator = torch.Generator(self.device)
        self.reseed(seed)

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Each value's largest over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._host_group)
        return tensor.tolist()

    def largest(self, value: int | None) -> int | None:
        """Largest over the ranks of what every rank has, or None where none has it."""
        return None if value is None else int(self.maximum([value])[0])

    def first_error(self, error: str) -> str:
        """The first rank's error that has one; "" if no rank has."""
        errors: list[str | None] = [None] * self.size
        dist.all_gather_object(errors, error, group=self._host_group)
        named = [f"rank {rank}: {one}" for rank, one in enumerate(errors) if one]
        return named[0] if named else ""

    def together(self, function: Callable[[], _Result]) -> _Result:
        """Run ``function`` on all ranks, which begin together, and return its result.

        ``function`` must not wait for other ranks except in collectives of the layer: after an
        error on one rank the others leave a collective by its timeout only.

        Raises:
            CaseError: On every rank if it fails on any.
        """
        result, error = None, ""
        self.meet()
        try:
            result = function()
            self.synchronize()
        except Exception as problem:
            error = reason(problem)
        first = self.first_error(error)
        if first:
            raise CaseError(first)
        return result  # type: ignore[return-value]

    def meet(self) -> None:
        """Wait for the GPU and for all ranks."""
        self.synchronize()
        dist.barrier(group=self._host_group)

    def leave(self) -> None:
        """Leave all groups."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
