"""What ranks have together: folders, results of one or all, whole tensors, entries of states."""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor, nn

from absorbed_mla.checkpoint.distributed import model_sharded_state_dict
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


def optimizer_states(model: nn.Module) -> dict:
    """Entries of one state per parameter, 3 p + 1, as Megatron's optimizer makes them."""
    entries = nested_values(model_sharded_state_dict(model))
    # The optimizer looks for the parameter itself.
    by_parameter = {id(entry.data): entry for entry in entries}
    return {
        name: make_sharded_optimizer_tensor(
            by_parameter[id(parameter)], 3 * parameter.detach() + 1, "optimizer.state.exp_avg"
        )
        for name, parameter in model.named_parameters()
    }
