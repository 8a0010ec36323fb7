"""What computes and reduces the gradients of a chunk of the model: Megatron's DDP and two FSDPs."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import distributed
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.support import world
from tests.support.recipes.recipe import Recipe


def ddp(recipe: Recipe, chunk: nn.Module) -> nn.Module:
    """Megatron's DistributedDataParallel; gradients are summed in fp32."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **recipe.ddp)
    return DistributedDataParallel(chunk.config, settings, chunk)


def megatron_fsdp(recipe: Recipe, chunk: nn.Module) -> nn.Module:
    """Megatron-FSDP, with its own choice of units: the transformer layers."""
    settings = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        megatron_fsdp_main_grads_dtype=torch.float32,
        megatron_fsdp_grad_comm_dtype=torch.float32,
        # The fused sum and division is NCCL's.
        gradient_reduce_div_fusion=world.device().type == "cuda",
        **recipe.ddp,
    )
    with _meshes_of_this_device():
        return distributed.FullyShardedDataParallel(
            chunk.config, settings, chunk, device=world.device()
        )


def torch_fsdp(recipe: Recipe, chunk: nn.Module) -> nn.Module:
    """Megatron's wrapper of PyTorch's ``fully_shard``."""
    settings = TorchFullyShardedDataParallelConfig(**recipe.ddp)
    with _meshes_of_this_device():
        return distributed.TorchFullyShardedDataParallel(chunk.config, settings, chunk)


@contextlib.contextmanager
def _meshes_of_this_device() -> Iterator[None]:
    """Megatron's wrappers ask for meshes of GPUs, and for the number of this process's GPU."""
    if world.device().type == "cuda":
        yield
        return
    from_group = DeviceMesh.from_group

    def on_a_cpu(group, device_type=None, **more):
        return from_group(group, "cpu", **more)

    with (
        mock.patch.object(DeviceMesh, "from_group", on_a_cpu),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        yield


def weights(chunks: list[nn.Module], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of wrapped chunks in a dtype, those that FSDP has sharded whole; collective."""
    found = {}
    for number, chunk in enumerate(chunks):
        named = _of_megatron_fsdp(chunk) if _is_megatron_fsdp(chunk) else _named(chunk)
        for name, value in named.items():
            found[f"{number}.{name.split('module.')[-1]}"] = value.detach().to(dtype).clone()
    return found


def _named(chunk: nn.Module) -> dict[str, Tensor]:
    if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
        # The distributed optimizer would gather in the next forward.
        chunk.start_param_sync(force_sync=True)
    parameters = chunk.named_parameters()
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters}


def _is_megatron_fsdp(chunk: nn.Module) -> bool:
    return getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False)


def _of_megatron_fsdp(chunk: nn.Module) -> dict[str, Tensor]:
    """It shows its shards, which are uneven, in state dicts only."""
    chunk.stop_communication()
    own = {
        name: value.to_local() if isinstance(value, DTensor) else value
        for name, value in chunk.state_dict().items()
        if isinstance(value, Tensor) and "_extra_state" not in name
    }
    shapes = {name: value.shape for name, value in chunk.state_dict().items() if name in own}
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: value.detach().cpu() for name, value in own.items()})
    return {name: _joined([part[name] for part in parts], shapes[name]) for name in own}


def _joined(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """The whole of shards, or of copies."""
    if parts[0].shape != shape or sum(part.numel() for part in parts) == shape.numel():
        parts = [torch.cat([part.flatten() for part in parts])]
    return parts[0].view(shape).to(world.device())
