"""Converted checkpoints under tensor parallelism: every rank loads its share of what was written.

And the other way: what the ranks of a model saved is read as one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from absorbed_mla.checkpoint.distributed import load_model_weights
from absorbed_mla.checkpoint.names import KV_UP
from checkpoint_conversion.formats.torch_dist import TorchDistCheckpoint
from checkpoint_conversion.mapping import to_megatron
from checkpoint_conversion.megatron_args import to_megatron_args
from tests.conversion.megatron_models import (
    SAME,
    load_strictly,
    mapped_state,
    megatron_model,
    save_torch_dist,
)
from tests.conversion.support import (
    in_memory,
    load_all,
    random_tensors,
    read_torch_dist,
    tiny_config,
    write_torch_dist,
)
from tests.distributed.whole import on_one_rank, whole_tensors
from tests.support.combinations import grid

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


@grid(2, {"name": [*MODELS], "to": ("megatron", "absorbed"), "kind": KINDS})
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
