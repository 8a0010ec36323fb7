"""Per-rank files, written from one rank's file, load strictly into the ranks of a real model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from checkpoint_conversion.megatron_args import to_megatron_args
from tests.conversion.legacy_support import load_rank, read_legacy, save_rank, write_legacy
from tests.conversion.support import assert_same_tensors, tiny_config
from tests.distributed.test_distributed_checkpoint import (
    gathered,
    model,
    shared_folder,
)
from tests.support import world
from tests.support.models import MIXED, VOCAB, call, token_batch
from tests.support.numerics import relative_error

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
def test_ranks_of_a_real_model_load_their_files(name):
    """Parameters are those of the model without parallelism, and so is the loss."""
    layers, fields = LAYERS[name]
    config = tiny_config(intermediate_size=64, **fields)
    size, tensors = world.size(), {}
    with shared_folder() as folder:
        with world.parallel(tp=1):
            single = model("standard", layers)
            expected = {n: p.detach().cpu() for n, p in single.named_parameters()}
            loss = call(single, labels=token_batch(seed=7)).detach().cpu()
            if world.rank() == 0:
                args = to_megatron_args(config, dtype=torch.float32)
                content = {"args": args, "model": single.state_dict()}
                save_rank(folder / "one/mp_rank_00", content)
                tensors = read_legacy(folder / "one")
                options = {"tensor_parallel": size, "vocab_multiple": VOCAB // size}
                write_legacy(folder / "many", config, tensors, norms="separate", **options)
        dist.barrier()
        ranks = model("standard", layers, seed=1)
        path = folder / f"many/release/mp_rank_{world.rank():02d}"
        ranks.load_state_dict(load_rank(path, map_location="cpu")["model"], strict=True)
        # And back, from what the ranks themselves would save.
        args = to_megatron_args(config, dtype=torch.float32, tensor_parallel=size)
        state = {k: v if v is None else v.cpu() for k, v in ranks.state_dict().items()}
        save_rank(folder / f"saved/mp_rank_{world.rank():02d}", {"args": args, "model": state})
        dist.barrier()
        if world.rank() == 0:
            assert_same_tensors(read_legacy(folder / "saved"), tensors)
    found = whole_weights(ranks)
    assert set(found) == set(expected)
    for key, weight in expected.items():
        assert torch.equal(found[key], weight), key
    actual = call(ranks, labels=token_batch(seed=7)).detach().cpu()
    assert relative_error(actual, loss) < 1e-5
