"""Converted checkpoints under tensor parallelism: every rank loads its share of what was written.

The logits are then those of transformers. And the other way: what ranks saved is read as one.
"""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from absorbed_mla.checkpoint.distributed import load_model_weights
from absorbed_mla.checkpoint.names import KV_UP
from checkpoint_conversion.formats.legacy import as_mapped
from checkpoint_conversion.formats.torch_dist import TorchDistCheckpoint
from checkpoint_conversion.mapping import to_megatron
from checkpoint_conversion.megatron_args import to_megatron_args
from tests.conversion.converted import converted, loaded_logits
from tests.conversion.legacy_support import read_legacy, save_rank
from tests.conversion.megatron_models import (
    SAME,
    load_strictly,
    mapped_state,
    megatron_model,
    save_torch_dist,
)
from tests.conversion.models import Architecture
from tests.conversion.support import (
    assert_same_tensors,
    in_memory,
    load_all,
    random_tensors,
    read_torch_dist,
    tiny_config,
    write_torch_dist,
)
from tests.distributed.test_distributed_checkpoint import model as standard_or_absorbed
from tests.distributed.whole import on_one_rank, whole_tensors
from tests.support import needs, world
from tests.support.combinations import few_ranks, grid, two_ranks
from tests.support.models import MIXED

pytestmark = few_ranks

MODELS = {
    "dense": {"first_k_dense_replace": 3},
    "mixed": {},
    "mtp": {"num_nextn_predict_layers": 1},
}
KINDS = ("standard", "absorbed")


def whole_weights(model) -> dict[str, Tensor]:
    """Every tensor of the model over all ranks, under the mapping's names."""
    return mapped_state(whole_tensors(model.state_dict(keep_vars=True).items()))


def check(model, tensors, config) -> None:
    """The ranks together hold the tensors."""
    expected = load_all(to_megatron(in_memory(tensors), config))
    found = whole_weights(model)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@grid(1, {"name": [*MODELS], "to": ("megatron", "absorbed"), "kind": KINDS})
def test_ranks_load_their_shares(name, to, kind, folder):
    """With Megatron alone, which finds all it asks for and nothing else."""
    config = tiny_config(**SAME, **MODELS[name])
    tensors = random_tensors(config, torch.float32)
    on_one_rank(lambda: write_torch_dist(folder / "made", config, tensors, to, norms="separate"))
    model = megatron_model(config, kind)
    load_strictly(folder / "made/release", model, stacked=name == "dense")
    check(model, tensors, config)


def test_the_package_loads_transformer_engines_names(folder):
    config = tiny_config(**SAME)
    tensors = random_tensors(config, torch.float32)
    on_one_rank(
        lambda: write_torch_dist(folder / "made", config, tensors, "absorbed", norms="fused")
    )
    model = megatron_model(config, "absorbed")
    load_model_weights(model, folder / "made/release")
    check(model, tensors, config)


@grid(1, {"name": [*MODELS], "kind": KINDS})
def test_what_ranks_saved_is_read(name, kind, folder):
    config = tiny_config(**SAME, **MODELS[name])
    size = parallel_state.get_tensor_model_parallel_world_size()
    model = megatron_model(config, kind)
    args = to_megatron_args(config, tensor_parallel=size, dtype=torch.float32)
    save_torch_dist(folder / "saved", model, args, stacked=name == "dense")
    # Rank 0 writes the metadata after all ranks' tensors.
    dist.barrier()
    checkpoint = TorchDistCheckpoint(folder / "saved")
    assert checkpoint.format == {"standard": "megatron", "absorbed": "absorbed"}[kind]
    check(model, read_torch_dist(folder / "saved"), config)
    stored = next(tensor for key, tensor in checkpoint.stored.items() if key.endswith(KV_UP))
    assert stored.shape[-2:] == (128, 24)


BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
LAYERS = {
    "dense": ({"num_layers": 2}, {"num_hidden_layers": 2, "n_routed_experts": None}),
    "mixed": ({**MIXED, **BIAS}, {"n_shared_experts": 1}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_legacy_files_of_a_models_ranks_are_read(name, folder):
    """The ranks' files, merged, are the parameters that Megatron's own partition dims gather."""
    layers, fields = LAYERS[name]
    config = tiny_config(intermediate_size=64, **fields)
    made = standard_or_absorbed("standard", layers, seed=1)
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


# With one rank, every three properties: tests/conversion/test_logits.py.
@two_ranks
@needs.no_gpu
@grid(
    1,
    {
        "version": ("v2", "v3"),
        "q_lora": {"q_lora": True, "no-q_lora": False},
        "moe": {"moe": True, "dense": False},
        "rope": ("rope", "yarn"),
        "to": ("absorbed", "megatron"),
    },
)
def test_logits_of_transformers(version, q_lora, moe, rope, to):
    """Of the largest logit; float32 sums in another order stay 10 times below."""
    with converted(Architecture(version, q_lora, moe, rope), to) as (folder, tokens, expected):
        logits = loaded_logits(folder, tokens)
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
