"""Per-rank files of real, tiny Megatron models with standard MLA, in one process."""

from __future__ import annotations

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

from absorbed_mla.testing.standard_mla import get_standard_mla_decoder_block_spec
from checkpoint_conversion.formats.legacy import LegacyCheckpoint
from checkpoint_conversion.megatron_args import to_megatron_args
from tests.conversion.legacy_support import load_rank, read_legacy, save_rank, write_legacy
from tests.conversion.support import load_all, tiny_config
from tests.support.cases import TINY, config_for
from tests.support.models import MIXED, TOKENS, VOCAB, call, token_batch

BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
# Fields of config.json that describe these models.
SAME = {"intermediate_size": 64, "n_shared_experts": 1}
MODELS = {
    "dense": {"first_k_dense_replace": 3},
    "mixed": {},
    "mtp": {"num_nextn_predict_layers": 1},
    "tied": {"tie_word_embeddings": True},
    "tied mtp": {"tie_word_embeddings": True, "num_nextn_predict_layers": 1},
}


def megatron_model(config, seed=0, stage=(True, True)):
    """A GPTModel for the same dimensions; every weight is random, norms included."""
    changes = dict(MIXED, **BIAS) if config.num_experts else {"num_layers": config.num_layers}
    changes["mtp_num_layers"] = config.mtp_layers or None
    fields = config_for(TINY, torch.float32, **changes)
    spec = get_standard_mla_decoder_block_spec(fields, backend="local")
    mtp = None
    if config.mtp_layers:
        mtp = get_gpt_mtp_block_spec(fields, spec, use_transformer_engine=False)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    model = GPTModel(
        config=fields,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        share_embeddings_and_output_weights=config.tied_embeddings,
        pre_process=stage[0],
        post_process=stage[1],
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor is not None:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 5)
    return model


def weights(model):
    return {name: tensor for name, tensor in model.state_dict().items() if tensor is not None}


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
    """Its file is read, written anew, and loaded strictly into another model."""
    config = tiny_config(**SAME, **MODELS[name])
    model = megatron_model(config)
    save(tmp_path / "saved", config, model)
    checkpoint = LegacyCheckpoint(tmp_path / "saved")
    assert checkpoint.left_alone == {"mp_rank_00/optimizer": 16}
    assert checkpoint.config == config
    found = load_all(checkpoint.hugging_face_tensors())
    written = tmp_path / "written"
    write_legacy(written, config, found, norms="separate", vocab_multiple=VOCAB, iteration=10)
    state = load_rank(written / "iter_0000010/mp_rank_00")["model"]
    assert set(state) == set(model.state_dict())
    other = megatron_model(config, seed=1)
    other.load_state_dict(state, strict=True)
    expected = weights(model)
    assert set(weights(other)) == set(expected)
    for key, tensor in weights(other).items():
        assert torch.equal(tensor, expected[key]), key
    assert torch.equal(call(other), call(model))


def test_weights_are_those_of_the_model(tmp_path):
    """Against the model's own parameters, with no code of the package between."""
    config = tiny_config(**SAME, num_nextn_predict_layers=1)
    model = megatron_model(config)
    save(tmp_path, config, model)
    found, state = read_legacy(tmp_path), model.state_dict()
    attention = "decoder.layers.2.self_attention"
    expert = "decoder.layers.2.mlp.experts.local_experts.3"
    fc1 = state[f"{expert}.linear_fc1.weight"]
    mtp = "mtp.layers.0"
    for name, expected in {
        "model.embed_tokens": state["embedding.word_embeddings.weight"],
        "lm_head": state["output_layer.weight"],
        "model.norm": state["decoder.final_layernorm.weight"],
        "model.layers.2.self_attn.q_b_proj": state[f"{attention}.linear_q_up_proj.weight"],
        "model.layers.2.self_attn.kv_b_proj": state[f"{attention}.linear_kv_up_proj.weight"],
        "model.layers.2.self_attn.kv_a_layernorm": state[f"{attention}.kv_layernorm.weight"],
        "model.layers.2.mlp.experts.3.gate_proj": fc1[: len(fc1) // 2],
        "model.layers.2.mlp.experts.3.up_proj": fc1[len(fc1) // 2 :],
        "model.layers.2.mlp.experts.3.down_proj": state[f"{expert}.linear_fc2.weight"],
        "model.layers.3.enorm": state[f"{mtp}.enorm.weight"],
        "model.layers.3.eh_proj": state[f"{mtp}.eh_proj.weight"],
        "model.layers.3.shared_head.norm": state[f"{mtp}.final_layernorm.weight"],
        "model.layers.3.embed_tokens": state["embedding.word_embeddings.weight"],
        "model.layers.3.self_attn.o_proj": state[
            f"{mtp}.mtp_model_layer.self_attention.linear_proj.weight"
        ],
    }.items():
        assert torch.equal(found[f"{name}.weight"], expected), name


@pytest.mark.parametrize("name", ["mixed", "mtp", "tied", "tied mtp"])
def test_the_last_stage_holds_megatrons_names(tmp_path, name):
    """Embedding and output layer are copied where a stage computes with another stage's."""
    config = tiny_config(**SAME, **MODELS[name])
    found = megatron_model(config)
    save(tmp_path / "saved", config, found)
    tensors = read_legacy(tmp_path / "saved")
    write_legacy(
        tmp_path / "written",
        config,
        tensors,
        norms="separate",
        vocab_multiple=VOCAB,
        pipeline_parallel=3,
    )
    stages = [load_rank(tmp_path / f"written/release/mp_rank_00_00{i}")["model"] for i in range(3)]
    first, middle, last = ({n for n in model if "decoder.layers" not in n} for model in stages)
    assert first == {"embedding.word_embeddings.weight"}
    assert not middle
    # In one process Megatron gives every stage all layers; the rest is as it is in a pipeline.
    own = megatron_model(config, stage=(False, True)).state_dict()
    assert last == {n for n in own if "decoder.layers" not in n}


def test_tokens_matter():
    """The comparison of logits would see another model."""
    config = tiny_config(**SAME)
    assert token_batch().unique().numel() > 8
    assert not torch.equal(call(megatron_model(config)), call(megatron_model(config, seed=1)))
