"""Process groups of the ranks that hold a model together."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from absorbed_mla.cpu_host import enable_cpu_host
from absorbed_mla.serving.cpu_engine import enable_cpu_inference
from absorbed_mla.serving.llm_options import LLMOptions


def started_by_torchrun() -> bool:
    """Whether this process is one of several ranks that run the same program."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "LOCAL_RANK" in os.environ


def device_of(options: LLMOptions, local_rank: int) -> torch.device:
    """The device of a rank.

    Raises:
        ValueError: If the machine does not have it.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "cpu" and gpus:
        raise ValueError(
            "device 'cpu' needs a process that sees no GPU: set CUDA_VISIBLE_DEVICES to nothing"
        )
    if options.device == "cuda" and not gpus:
        raise ValueError("device 'cuda' needs a GPU, and there is none here")
    if options.cuda_graphs and not gpus:
        raise ValueError("cuda_graphs needs a GPU, and there is none here")
    if not gpus:
        return torch.device("cpu")
    if local_rank >= gpus:
        raise ValueError(
            "tensor_parallel_size x pipeline_parallel_size must be at most the number of GPUs, "
            f"{gpus}, got more than {local_rank}"
        )
    return torch.device("cuda", local_rank)


def join(
    options: LLMOptions, rank: int, world: int, store: dist.Store | None = None
) -> torch.device:
    """Join the process groups of PyTorch and Megatron that do not exist yet; collective.

    Args:
        options: With ``tensor_parallel_size`` set.
        rank: Of this process.
        world: Number of processes.
        store: Where they meet; None: where torchrun's environment says.

    Returns:
        This rank's device.

    Raises:
        ValueError: If the machine lacks the device, or groups of another size exist.
    """
    device = device_of(options, int(os.environ.get("LOCAL_RANK", rank)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        enable_cpu_host()
    if options.num_speculative_tokens:
        enable_cpu_inference()
    from megatron.core import parallel_state

    tp, ep = options.tensor_parallel_size, options.expert_parallel_size
    assert tp is not None
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=_of_attention(options),
            pipeline_model_parallel_size=options.pipeline_parallel_size,
            expert_model_parallel_size=ep,
            # All tensor-parallel ranks have experts, and no others.
            expert_tensor_parallel_size=tp // ep,
        )
    for name, found in (
        ("tensor_parallel_size", _num_processes_of_layer(options)),
        ("pipeline_parallel_size", parallel_state.get_pipeline_model_parallel_world_size()),
        ("expert_parallel_size", parallel_state.get_expert_model_parallel_world_size()),
    ):
        if found != getattr(options, name):
            raise ValueError(f"{name} must be Megatron's {found}, got {getattr(options, name)}")
    return device


def _of_attention(options: LLMOptions) -> int:
    """Processes that share the attention of a layer."""
    assert options.tensor_parallel_size is not None
    return 1 if options.data_parallel_attention else options.tensor_parallel_size


def _num_processes_of_layer(options: LLMOptions) -> int:
    """Processes that share a layer, by Megatron's groups."""
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_world_size()
    if options.data_parallel_attention and tp == 1:
        return parallel_state.get_expert_tensor_and_model_parallel_world_size()
    return tp
