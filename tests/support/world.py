"""The processes a test runs in: one under plain pytest, N under torchrun."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

# A rank that fails between two collectives leaves the others waiting this long.
_TIMEOUT = timedelta(seconds=120)


def start() -> None:
    """Join torchrun's processes, or be a world of one; tensor-parallel over all of them."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_TIMEOUT)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def stop() -> None:
    """Leave the process group."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def size() -> int:
    """Number of processes, which is the tensor-parallel size; known before they have joined."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    """This process."""
    return int(os.environ.get("RANK", 0)) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def device() -> torch.device:
    """Where modules live."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_reduce(x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
    """Reduced over all processes, out of place."""
    result = x.detach().clone().to(device())
    dist.all_reduce(result, op=op)
    return result


def gather(x: Tensor, dim: int) -> Tensor:
    """Every process's ``x``, one after the other along ``dim``."""
    parts = [torch.empty_like(x) for _ in range(size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts, dim=dim)


def own_part(x: Tensor, dim: int) -> Tensor:
    """This process's share of ``x`` when it is cut evenly along ``dim``."""
    if x.shape[dim] % size():
        raise ValueError(f"dim {dim} of {tuple(x.shape)} does not divide by {size()}")
    return x.chunk(size(), dim=dim)[rank()]
