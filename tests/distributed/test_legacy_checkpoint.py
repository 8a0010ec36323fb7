"""Per-rank files that the tensor-parallel ranks of a real model save are read as one model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from checkpoint_conversion.formats.legacy import as_mapped
from checkpoint_conversion.mapping import to_megatron
from checkpoint_conversion.megatron_args import to_megatron_args
from tests.conversion.legacy_support import read_legacy, save_rank
from tests.conversion.support import assert_same_tensors, in_memory, load_all, tiny_config
from tests.distributed.test_distributed_checkpoint import model
from tests.distributed.whole import whole_tensors
from tests.support import world
from tests.support.models import MIXED

BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
LAYERS = {
    "dense": ({"num_layers": 2}, {"num_hidden_layers": 2, "n_routed_experts": None}),
    "mixed": ({**MIXED, **BIAS}, {"n_shared_experts": 1}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_files_of_a_real_models_ranks_are_read(name, folder):
    """The ranks' files, merged, are the parameters that Megatron's own partition dims gather."""
    layers, fields = LAYERS[name]
    config = tiny_config(intermediate_size=64, **fields)
    made = model("standard", layers, seed=1)
    args = to_megatron_args(config, dtype=torch.float32, tensor_parallel=world.size())
    state = {k: v if v is None else v.cpu() for k, v in made.state_dict().items()}
    biases = {k: v for k, v in state.items() if k.endswith("expert_bias")}
    whole = whole_tensors(made.named_parameters())
    weights = {k: v.detach().cpu() for k, v in whole.items()}
    expected = {as_mapped(k): v for k, v in (weights | biases).items()}
    save_rank(folder / f"mp_rank_{world.rank():02d}", {"args": args, "model": state})
    dist.barrier()
    if world.rank() == 0:
        found = in_memory(read_legacy(folder))
        assert_same_tensors(load_all(to_megatron(found, config)), expected)
