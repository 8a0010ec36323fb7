"""Per-rank files that the tensor-parallel ranks of a real model save are read as one model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from checkpoint_conversion.formats.legacy_sharding import as_mapped
from checkpoint_conversion.mapping import to_megatron
from checkpoint_conversion.megatron_args import to_megatron_args
from tests.conversion.legacy_support import read_legacy, save_rank
from tests.conversion.support import assert_same_tensors, in_memory, load_all, tiny_config
from tests.distributed.test_distributed_checkpoint import (
    gathered,
    model,
    shared_folder,
)
from tests.support import world
from tests.support.models import MIXED

BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
LAYERS = {
    "dense": ({"num_layers": 2}, {"num_hidden_layers": 2, "n_routed_experts": None}),
    "mixed": ({**MIXED, **BIAS}, {"n_shared_experts": 1}),
}


def whole_weights(made):
    """Every parameter over all ranks; the halves of a gated layer put together again."""
    whole = {}
    for name, parameter in made.named_parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            whole[name] = parameter.detach()
            continue
        whole[name] = gathered(parameter, parameter.partition_dim)
        if name.endswith("linear_fc1.weight"):
            halves = whole[name].view(world.size(), 2, -1, parameter.shape[1])
            whole[name] = halves.transpose(0, 1).reshape(whole[name].shape)
    return {name: tensor.cpu() for name, tensor in whole.items()}


@pytest.mark.parametrize("name", LAYERS)
def test_files_of_a_real_models_ranks_are_read(name):
    """The ranks' files, merged, are the parameters that Megatron's own partition dims gather."""
    layers, fields = LAYERS[name]
    config = tiny_config(intermediate_size=64, **fields)
    made = model("standard", layers, seed=1)
    args = to_megatron_args(config, dtype=torch.float32, tensor_parallel=world.size())
    state = {k: v if v is None else v.cpu() for k, v in made.state_dict().items()}
    biases = {k: v for k, v in state.items() if k.endswith("expert_bias")}
    expected = {as_mapped(k): v for k, v in (whole_weights(made) | biases).items()}
    with shared_folder() as folder:
        save_rank(folder / f"mp_rank_{world.rank():02d}", {"args": args, "model": state})
        dist.barrier()
        if world.rank() == 0:
            found = in_memory(read_legacy(folder))
            assert_same_tensors(load_all(to_megatron(found, config)), expected)
