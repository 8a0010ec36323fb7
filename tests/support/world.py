"""The processes a test runs in: one under plain pytest, N under torchrun.

All of them are tensor-parallel, except inside :func:`parallel`.
"""

import contextlib
import os
import queue
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor

from absorbed_mla.serving.parallel_groups import ParallelGroups
from tests.support.gloo import share_one_device

# A rank that fails between two collectives leaves the others waiting this long.
_TIMEOUT = timedelta(seconds=120)
_outermost = contextlib.ExitStack()


def start() -> None:
    """Join torchrun's processes, or be a world of one; tensor-parallel over all of them."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    share_one_device()
    # Without it Megatron starts a process that imports PyTorch and Megatron, to pass on what was
    # written by writers in processes of their own, which no test has.
    if getattr(filesystem_async, "_results_queue", False) is None:
        filesystem_async._results_queue = queue.SimpleQueue()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        _limit_memory()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_TIMEOUT)
    _outermost.enter_context(parallel(tp=dist.get_world_size()))


def _limit_memory() -> None:
    """Take at most so much of a GPU that other tests use, too (scripts/checks/run_gpu_tests.py)."""
    gib = os.environ.get("ABSORBED_MLA_GPU_MEMORY_GIB")
    if gib:
        share = float(gib) * 2**30 / torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))


# By sizes, created once: each has threads and sockets until the job ends.
_GROUPS: dict[tuple, ParallelGroups] = {}


@contextlib.contextmanager
def parallel(*, tp: int = 1, cp: int = 1, **more) -> Iterator[None]:
    """Use other parallel sizes inside the block: ``tp``, ``cp``, and others that Megatron takes.

    Sizes that are not given are 1; the remaining ranks are data-parallel.
    """
    key = (tp, cp, *sorted(more.items()))
    if key not in _GROUPS:
        sizes = {"tensor_model_parallel_size": tp, "context_parallel_size": cp, **more}
        _GROUPS[key] = ParallelGroups(**sizes)
    try:
        with _GROUPS[key]:
            tensor_parallel.model_parallel_cuda_manual_seed(1234)
            yield
    finally:
        if parallel_state.model_parallel_is_initialized():
            tensor_parallel.model_parallel_cuda_manual_seed(1234)


def stop() -> None:
    """Leave the process group."""
    _outermost.close()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def size() -> int:
    """Number of processes; known before the process group exists."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    """This process."""
    return int(os.environ.get("RANK", 0)) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def device() -> torch.device:
    """The device of modules under test."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def tp_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


def tp_fields() -> dict[str, object]:
    """Of Megatron's config: the tensor-parallel size, with sequence parallelism if it is not 1."""
    return {"tensor_model_parallel_size": tp_size(), "sequence_parallel": tp_size() > 1}


def cp_size() -> int:
    return parallel_state.get_context_parallel_world_size()


def tp_group() -> dist.ProcessGroup:
    """This process's tensor-parallel group."""
    return parallel_state.get_tensor_model_parallel_group()


def cp_group() -> dist.ProcessGroup:
    """This process's context-parallel group."""
    return parallel_state.get_context_parallel_group()


def all_reduce(
    x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Reduced over all processes, or a group of them, out of place."""
    result = x.detach().clone().to(device())
    dist.all_reduce(result, op=op, group=group)
    return result


def gather(x: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """``x`` of all ranks of a group, by default the tensor-parallel one, joined along ``dim``."""
    group = group or tp_group()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def own_part(x: Tensor, dim: int) -> Tensor:
    """This rank's part of ``x``, split evenly along ``dim`` over the tensor-parallel ranks."""
    if x.shape[dim] % tp_size():
        raise ValueError(f"dim {dim} of {tuple(x.shape)} does not divide by {tp_size()}")
    return x.chunk(tp_size(), dim=dim)[parallel_state.get_tensor_model_parallel_rank()]
