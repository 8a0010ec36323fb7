"""Checkpoints of real, tiny Megatron models in one process: read from them, loaded into them."""

import argparse
import json

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.transformer.enums import AttnBackend

from absorbed_mla.checkpoint.distributed import load_model_weights
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.torch_dist import TorchDistCheckpoint, extra_state_names
from checkpoint_conversion.layouts import MegatronLayout, laid_out_tensors
from checkpoint_conversion.mapping import to_megatron
from checkpoint_conversion.megatron_args import to_megatron_args
from tests.conversion.legacy_support import save_rank
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
    read,
    refused,
    tiny_config,
    write_torch_dist,
)
from tests.support.combinations import grid

# Fields of config.json, and whether Megatron stacks the layers.
MODELS = {
    "dense": ({"first_k_dense_replace": 3}, True),
    "dense numbered": ({"first_k_dense_replace": 3}, False),
    "mixed": ({}, False),
    "all moe": ({"first_k_dense_replace": 0}, True),
    "mtp": ({"num_nextn_predict_layers": 1}, False),
    "tied": ({"tie_word_embeddings": True}, False),
    "tied mtp": ({"tie_word_embeddings": True, "num_nextn_predict_layers": 1}, False),
}
KINDS = ("standard", "absorbed")


def save_ranks(folder, config, model):
    """As Megatron's save_checkpoint laid out files per rank."""
    content = {
        "args": to_megatron_args(config, dtype=torch.float32),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": model.state_dict(),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(4)}}},
    }
    save_rank(folder / "iter_0000010/mp_rank_00", content)
    (folder / "latest_checkpointed_iteration.txt").write_text("10")


@grid(1, {"name": [*MODELS], "kind": [*KINDS, "ranks"]})
def test_every_model_is_read(tmp_path, name, kind):
    """Bit by bit, from what Megatron saved."""
    changes, stacked = MODELS[name]
    config = tiny_config(**SAME, **changes)
    if kind == "ranks":
        model = megatron_model(config)
        save_ranks(tmp_path, config, model)
    else:
        model = megatron_model(config, kind)
        args = to_megatron_args(config, dtype=torch.float32)
        save_torch_dist(tmp_path, model, args, stacked=stacked)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == config
    formats = {"standard": "megatron", "absorbed": "absorbed", "ranks": "megatron-legacy"}
    assert checkpoint.format == formats[kind]
    layers = None if kind == "ranks" else "stacked" if stacked else "numbered"
    assert checkpoint.layout.get("layers") == layers
    assert checkpoint.layout["iteration"] == 10
    assert not checkpoint.notes
    assert checkpoint.left_alone == ({"mp_rank_00/optimizer": 16} if kind == "ranks" else {})
    found = in_memory(load_all(checkpoint.hugging_face_tensors()))
    assert_same_tensors(load_all(to_megatron(found, config)), mapped_weights(model))


@grid(1, {"name": [*MODELS], "to": ["megatron", "absorbed"]})
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


# Tensors of layer 2, an expert and the MTP layer: Hugging Face's name, and that of a state dict.
_NAMES = {
    "model.embed_tokens": "embedding.word_embeddings",
    "lm_head": "output_layer",
    "model.norm": "decoder.final_layernorm",
    "model.layers.2.self_attn.q_a_layernorm": "decoder.layers.2.self_attention.q_layernorm",
    "model.layers.2.self_attn.q_b_proj": "decoder.layers.2.self_attention.linear_q_up_proj",
    "model.layers.2.self_attn.kv_a_proj_with_mqa": (
        "decoder.layers.2.self_attention.linear_kv_down_proj"
    ),
    "model.layers.2.self_attn.kv_b_proj": "decoder.layers.2.self_attention.linear_kv_up_proj",
    "model.layers.2.self_attn.kv_a_layernorm": "decoder.layers.2.self_attention.kv_layernorm",
    "model.layers.2.mlp.experts.3.down_proj": (
        "decoder.layers.2.mlp.experts.local_experts.3.linear_fc2"
    ),
    "model.layers.3.enorm": "mtp.layers.0.enorm",
    "model.layers.3.eh_proj": "mtp.layers.0.eh_proj",
    "model.layers.3.shared_head.norm": "mtp.layers.0.final_layernorm",
    "model.layers.3.embed_tokens": "embedding.word_embeddings",
    "model.layers.3.self_attn.o_proj": "mtp.layers.0.mtp_model_layer.self_attention.linear_proj",
}


@pytest.mark.parametrize("kind", ["ranks", "torch_dist"])
def test_weights_are_those_of_the_model(tmp_path, kind):
    """Against the model's own parameters, with no code of the package between."""
    config = tiny_config(**SAME, num_nextn_predict_layers=1)
    model = megatron_model(config)
    if kind == "ranks":
        save_ranks(tmp_path, config, model)
    else:
        save_torch_dist(tmp_path, model, to_megatron_args(config))
    found, state = read(tmp_path), model.state_dict()
    for name, theirs in _NAMES.items():
        assert torch.equal(found[f"{name}.weight"], state[f"{theirs}.weight"]), name
    mlp, theirs = "model.layers.2.mlp.", "decoder.layers.2.mlp."
    bias = state[f"{theirs}router.expert_bias"]
    assert torch.equal(found[f"{mlp}gate.e_score_correction_bias"], bias)
    fc1 = state[f"{theirs}experts.local_experts.3.linear_fc1.weight"].chunk(2)
    for part, expected in zip(("gate", "up"), fc1):
        assert torch.equal(found[f"{mlp}experts.3.{part}_proj.weight"], expected)


@pytest.mark.parametrize("name", ["mixed", "mtp", "tied", "tied mtp"])
def test_stages_of_a_pipeline(tmp_path, name):
    """Embedding and output layer are copied where a stage computes with another stage's."""
    config = tiny_config(**SAME, **MODELS[name][0])
    model = megatron_model(config)
    save_ranks(tmp_path / "one", config, model)
    values = model.state_dict()
    if config.tied_embeddings:
        values["output_layer.weight"] = values["embedding.word_embeddings.weight"]
    args = to_megatron_args(config, dtype=torch.float32)
    args.pipeline_model_parallel_size = 3
    for stage in range(3):
        # In one process Megatron gives a stage all layers; its other names are as in a pipeline.
        names = megatron_model(config, stage=(stage == 0, stage == 2)).state_dict()
        decoder = "decoder.layers" if stage == 2 else "decoder"
        own = {key: values[key] for key in names if not key.startswith(decoder)}
        layer = f"decoder.layers.{stage}."
        for key in values:
            if key.startswith(layer):
                own[key.replace(layer, "decoder.layers.0.")] = values[key]
        save_rank(tmp_path / f"three/mp_rank_00_00{stage}", {"args": args, "model": own})
    assert_same_tensors(read(tmp_path / "three"), read(tmp_path / "one"))


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
    attention = "self_attention.linear_"
    fused = (f"{attention}q_up_proj", f"{attention}kv_up_proj", "mlp.linear_fc1")
    assert {name.removeprefix(layer) for name in names if name.startswith(layer)} == {
        "input_layernorm.weight",
        "mlp.linear_fc2.weight",
        *(f"{name}.{part}" for name in fused for part in ("weight", "layer_norm_weight")),
        *(f"{attention}{name}.weight" for name in ("q_down_proj", "kv_down_proj", "proj")),
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
