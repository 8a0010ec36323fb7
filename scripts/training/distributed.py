"""Set up and destroy the process group, Megatron's parallel groups and the random seeds."""

from __future__ import annotations

import argparse
import os
import random
import socket
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from absorbed_mla.cpu_host import enable_cpu_host
from console.ranks import rank as rank
from console.ranks import world_size as world_size


def initialize(args: argparse.Namespace) -> torch.device:
    """Join the process group, create Megatron's groups, seed all random number generators.

    Returns:
        The device of this process.
    """
    if "RANK" not in os.environ:
        _set_single_process()
    device = torch.device("cpu")
    if not enable_cpu_host():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    seed(args.seed)
    return device


def seed(value: int) -> None:
    """Seed all random number generators, each pipeline stage differently, as Megatron does."""
    value += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    tensor_parallel.model_parallel_cuda_manual_seed(value)


def finish() -> None:
    """Destroy all process groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _set_single_process() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
