"""Per-rank files of real, tiny Megatron models with standard MLA, in one process."""

from __future__ import annotations

import pytest
import torch

from checkpoint_conversion.formats.legacy import LegacyCheckpoint
from checkpoint_conversion.mapping import to_megatron
from checkpoint_conversion.megatron_args import to_megatron_args
from tests.conversion.legacy_support import read_legacy, save_rank
from tests.conversion.megatron_models import (
    SAME,
    mapped_weights,
    megatron_model,
    save_torch_dist,
)
from tests.conversion.support import (
    assert_same_tensors,
    in_memory,
    load_all,
    read_torch_dist,
    tiny_config,
)

MODELS = {
    "dense": {"first_k_dense_replace": 3},
    "mixed": {},
    "mtp": {"num_nextn_predict_layers": 1},
    "tied": {"tie_word_embeddings": True},
    "tied mtp": {"tie_word_embeddings": True, "num_nextn_predict_layers": 1},
}


def save(folder, config, model):
    """As Megatron's save_checkpoint lays it out."""
    content = {
        "args": to_megatron_args(config, dtype=torch.float32),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": model.state_dict(),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(4)}}},
    }
    save_rank(folder / "iter_0000010/mp_rank_00", content)
    (folder / "latest_checkpointed_iteration.txt").write_text("10")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_bit_by_bit(tmp_path, name):
    """Its file is read, converted back to Megatron's tensors and compared with its weights."""
    config = tiny_config(**SAME, **MODELS[name])
    model = megatron_model(config)
    save(tmp_path, config, model)
    checkpoint = LegacyCheckpoint(tmp_path)
    assert checkpoint.left_alone == {"mp_rank_00/optimizer": 16}
    assert checkpoint.config == config
    found = load_all(checkpoint.hugging_face_tensors())
    assert_same_tensors(load_all(to_megatron(in_memory(found), config)), mapped_weights(model))


@pytest.mark.parametrize("kind", ["legacy", "torch_dist"])
def test_weights_are_those_of_the_model(tmp_path, kind):
    """Against the model's own parameters, with no code of the package between."""
    config = tiny_config(**SAME, num_nextn_predict_layers=1)
    model = megatron_model(config)
    if kind == "legacy":
        save(tmp_path, config, model)
        found = read_legacy(tmp_path)
    else:
        save_torch_dist(tmp_path, model, to_megatron_args(config))
        found = read_torch_dist(tmp_path)
    state = model.state_dict()
    attention = "decoder.layers.2.self_attention"
    expert = "decoder.layers.2.mlp.experts.local_experts.3"
    fc1 = state[f"{expert}.linear_fc1.weight"]
    mtp = "mtp.layers.0"
    for name, expected in {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "lm_head.weight": state["output_layer.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
        "model.layers.2.self_attn.q_a_layernorm.weight": state[f"{attention}.q_layernorm.weight"],
        "model.layers.2.self_attn.q_b_proj.weight": state[f"{attention}.linear_q_up_proj.weight"],
        "model.layers.2.self_attn.kv_b_proj.weight": state[f"{attention}.linear_kv_up_proj.weight"],
        "model.layers.2.self_attn.kv_a_layernorm.weight": state[f"{attention}.kv_layernorm.weight"],
        "model.layers.2.mlp.gate.e_score_correction_bias": state[
            "decoder.layers.2.mlp.router.expert_bias"
        ],
        "model.layers.2.mlp.experts.3.gate_proj.weight": fc1[: len(fc1) // 2],
        "model.layers.2.mlp.experts.3.up_proj.weight": fc1[len(fc1) // 2 :],
        "model.layers.2.mlp.experts.3.down_proj.weight": state[f"{expert}.linear_fc2.weight"],
        "model.layers.3.enorm.weight": state[f"{mtp}.enorm.weight"],
        "model.layers.3.eh_proj.weight": state[f"{mtp}.eh_proj.weight"],
        "model.layers.3.shared_head.norm.weight": state[f"{mtp}.final_layernorm.weight"],
        "model.layers.3.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "model.layers.3.self_attn.o_proj.weight": state[
            f"{mtp}.mtp_model_layer.self_attention.linear_proj.weight"
        ],
    }.items():
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("name", ["mixed", "mtp", "tied", "tied mtp"])
def test_stages_of_a_pipeline(tmp_path, name):
    """Embedding and output layer are copied where a stage computes with another stage's."""
    config = tiny_config(**SAME, **MODELS[name])
    model = megatron_model(config)
    save(tmp_path / "one", config, model)
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
    assert_same_tensors(read_legacy(tmp_path / "three"), read_legacy(tmp_path / "one"))
