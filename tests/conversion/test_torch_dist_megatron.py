"""Distributed checkpoints of real, tiny Megatron models: read from them, loaded into them."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.transformer.enums import AttnBackend

from absorbed_mla.checkpoint.distributed import load_model_weights
from checkpoint_conversion.formats.torch_dist import TorchDistCheckpoint, extra_state_names
from checkpoint_conversion.layouts import MegatronLayout, laid_out_tensors
from checkpoint_conversion.mapping import to_megatron
from checkpoint_conversion.megatron_args import to_megatron_args
from tests.conversion.megatron_models import (
    SAME,
    load_strictly,
    mapped_weights,
    megatron_model,
    save_torch_dist,
)
from tests.conversion.support import (
    assert_same_tensors,
    in_memory,
    load_all,
    random_tensors,
    refused,
    tiny_config,
    write_torch_dist,
)

# Fields of config.json, and whether Megatron stacks the layers.
MODELS = {
    "dense": ({"first_k_dense_replace": 3}, True),
    "dense numbered": ({"first_k_dense_replace": 3}, False),
    "mixed": ({}, False),
    "all moe": ({"first_k_dense_replace": 0}, True),
    "mtp": ({"num_nextn_predict_layers": 1}, False),
    "tied mtp": ({"tie_word_embeddings": True, "num_nextn_predict_layers": 1}, False),
}
KINDS = ("standard", "absorbed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_read(tmp_path, name, kind):
    """Bit by bit, from what Megatron saved."""
    changes, stacked = MODELS[name]
    config = tiny_config(**SAME, **changes)
    model = megatron_model(config, kind)
    args = to_megatron_args(config, dtype=torch.float32)
    save_torch_dist(tmp_path, model, args, stacked=stacked)
    checkpoint = TorchDistCheckpoint(tmp_path)
    assert checkpoint.config == config
    assert checkpoint.format == {"standard": "megatron", "absorbed": "absorbed"}[kind]
    assert checkpoint.layout["layers"] == ("stacked" if stacked else "numbered")
    assert checkpoint.layout["iteration"] == 10
    assert not checkpoint.notes
    found = load_all(checkpoint.hugging_face_tensors())
    assert_same_tensors(load_all(to_megatron(in_memory(found), config)), mapped_weights(model))


@pytest.mark.parametrize("to", ["megatron", "absorbed"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_loads_what_is_written(tmp_path, name, to):
    """Megatron finds everything it asks for, and nothing else, in either attention's checkpoint."""
    changes, stacked = MODELS[name]
    config = tiny_config(**SAME, **changes)
    tensors = random_tensors(config, torch.float32)
    layers = "stacked" if stacked else "numbered"
    write_torch_dist(tmp_path, config, tensors, to, norms="separate", layers=layers)
    expected = load_all(to_megatron(in_memory(tensors), config))
    for kind in KINDS:
        model = megatron_model(config, kind)
        load_strictly(tmp_path / "release", model, stacked=stacked)
        assert_same_tensors(mapped_weights(model), expected)


@pytest.mark.parametrize("norms", ["separate", "fused"])
@pytest.mark.parametrize("to", ["megatron", "absorbed"])
def test_the_package_loads_either_norm_layout(tmp_path, to, norms):
    config = tiny_config(**SAME)
    tensors = random_tensors(config, torch.float32)
    write_torch_dist(tmp_path, config, tensors, to, norms=norms)
    model = megatron_model(config, "absorbed")
    load_model_weights(model, tmp_path / "release")
    expected = load_all(to_megatron(in_memory(tensors), config))
    assert_same_tensors(mapped_weights(model), expected)


def test_names_of_transformer_engines_models():
    """What its modules ask for, as GPTModel's sharded_state_dict says where it is installed."""
    config = tiny_config(num_nextn_predict_layers=1)
    tensors = to_megatron(in_memory(random_tensors(config)), config)
    names = list(laid_out_tensors(tensors, MegatronLayout(norms="fused"), config))
    layer = "decoder.layers.0."
    assert {name.removeprefix(layer) for name in names if name.startswith(layer)} == {
        "input_layernorm.weight",
        "self_attention.linear_q_down_proj.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.linear_q_up_proj.weight",
        "self_attention.linear_kv_down_proj.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.linear_kv_up_proj.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    }
    states = extra_state_names(names, "fused", False, config)
    assert len(set(states)) == len(states)
    modules = {name.partition("._extra_state")[0] for name in states}
    norms = {module for module in modules if "norm" in module}
    mtp = ("enorm", "hnorm", "final_layernorm", "transformer_layer.input_layernorm")
    assert norms == {
        "decoder.final_layernorm",
        *(f"decoder.layers.{n}.input_layernorm" for n in range(3)),
        # Those of dense layers are part of linear_fc1.
        *(f"decoder.layers.{n}.pre_mlp_layernorm" for n in (1, 2)),
        *(f"mtp.layers.0.{name}" for name in (*mtp, "transformer_layer.pre_mlp_layernorm")),
    }
    assert "mtp.layers.0.eh_proj._extra_state/shard_0_1" in states
    assert "decoder.layers.1.mlp.experts.experts.linear_fc2._extra_state/shard_3_4" in states
    assert not any("core_attention" in module or "output_layer" in module for module in modules)


class TestWhatIsBesideTheWeights:
    @pytest.fixture
    def config(self):
        return tiny_config(**SAME, first_k_dense_replace=3)

    def test_training_state_is_left_alone(self, tmp_path, config):
        model = megatron_model(config)
        state = {
            "optimizer": {
                "exp_avg": ShardedTensor.from_rank_offsets(
                    "optimizer.state.exp_avg.output_layer.weight", torch.zeros(8, 4)
                ),
                "param_groups": ShardedObject("optimizer.param_groups", {"lr": 1.0}, (1,), (0,)),
            },
            "rng_state": ShardedObject("rng_state", [1, 2], (1,), (0,)),
        }
        save_torch_dist(tmp_path, model, to_megatron_args(config), **state)
        checkpoint = TorchDistCheckpoint(tmp_path)
        assert set(checkpoint.left_alone) == {
            "optimizer.state.exp_avg.output_layer.weight",
            "optimizer.param_groups/shard_0_1",
            "rng_state/shard_0_1",
        }
        assert min(checkpoint.left_alone.values()) >= 8 * 4 * 4
        assert not checkpoint.notes
        assert not any("optimizer" in name for name in checkpoint.stored)
        checkpoint.hugging_face_tensors()

    def test_states_with_content_are_said(self, tmp_path, config):
        """FP8 scales are nothing that a converted checkpoint can have."""
        model = megatron_model(config)
        state = ShardedObject(
            "decoder.layers.0.mlp.linear_fc1._extra_state", torch.zeros(4096), (1,), (0,)
        )
        unknown = ShardedObject("something", 1, (1,), (0,))
        args = to_megatron_args(config)
        save_torch_dist(tmp_path, model, args, stacked=True, extra=state, unknown=unknown)
        checkpoint = TorchDistCheckpoint(tmp_path)
        name = "decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1"
        assert set(checkpoint.left_alone) == {name, "something/shard_0_1"}
        assert len(checkpoint.notes) == 2
        assert "1 modules have FP8 states" in checkpoint.notes[0]
        assert name in checkpoint.notes[0]
        assert "something/shard_0_1 is an object of an unknown kind" in checkpoint.notes[1]

    def test_a_tensor_that_no_model_has(self, tmp_path, config):
        stray = ShardedTensor.from_rank_offsets("decoder.layers.0.bias", torch.zeros(4))
        save_torch_dist(tmp_path, megatron_model(config), to_megatron_args(config), stray=stray)
        with refused("decoder.layers.0.bias of shape (4,)"):
            TorchDistCheckpoint(tmp_path).hugging_face_tensors()

    def test_arguments_of_megatrons_own_classes(self, tmp_path, config):
        """They are not imported; what matters is read all the same."""
        args = to_megatron_args(config)
        args.attention_backend = AttnBackend.auto
        args.dtypes = {"a": torch.bfloat16}
        save_torch_dist(tmp_path, megatron_model(config), args)
        assert TorchDistCheckpoint(tmp_path).config == config

    def test_the_common_file_of_earlier_releases(self, tmp_path, config):
        save_torch_dist(tmp_path, megatron_model(config))
        with refused("--hf-config"):
            TorchDistCheckpoint(tmp_path)
        common = {"args": to_megatron_args(config), "iteration": 3, "checkpoint_version": 3.0}
        torch.save(common, tmp_path / "iter_0000010/common.pt")
        checkpoint = TorchDistCheckpoint(tmp_path)
        assert checkpoint.config == config
        assert checkpoint.layout["iteration"] == 3

    def test_arguments_that_cannot_be_read(self, tmp_path, config):
        """They are needed only where nothing else says what the model is."""
        save_torch_dist(tmp_path, megatron_model(config))
        inner = tmp_path / "iter_0000010"
        torch.save({"args": argparse.Namespace(f=print)}, inner / "common.pt")
        with refused("__builtin__.print"):
            TorchDistCheckpoint(tmp_path)
        given = tmp_path / "config.json"
        given.write_text(json.dumps(config.hugging_face))
        checkpoint = TorchDistCheckpoint(tmp_path, hf_config=given)
        assert checkpoint.config == config
        assert "__builtin__.print" in checkpoint.notes[0]
