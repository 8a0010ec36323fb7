"""Presets, their scaling and the sizes given on the command line of scripts/train.py."""

from __future__ import annotations

import pytest
import torch

from absorbed_mla.dims import MLADims, softmax_scale
from absorbed_mla.dsa.config import DSAConfig
from checkpoint_conversion.moe_pattern import moe_layers, parse_moe_layer_freq
from training.arguments import parse_arguments
from training.model import build_config
from training.model_options import padded_vocab_size, resolve_model
from training.presets import PRESETS, get_preset, scale_down

REAL = [name for name in PRESETS if name != "tiny"]
_SCALES = {
    "deepseek-v2-lite": 0.1147214,
    "deepseek-v3": 0.1352338,
    "deepseek-v3.2": 0.1352338,
    "glm-5": 0.0625,
    "kimi-k2": 0.1308608,
    "moonlight": 0.0721688,
}


def _resolve(*argv: str):
    return resolve_model(parse_arguments(list(argv)))


@pytest.mark.parametrize("name", REAL)
def test_softmax_scale_of_the_released_models(name):
    args = parse_arguments(["--preset", name])
    config = build_config(args, resolve_model(args), torch.device("cpu"))
    assert softmax_scale(config, MLADims.from_config(config, 1)) == pytest.approx(
        _SCALES[name], rel=1e-6
    )


@pytest.mark.parametrize("name", REAL)
def test_released_models_have_the_released_shape(name):
    preset = get_preset(name)
    heads = (192, 256) if name == "glm-5" else (128, 128)
    assert (preset.kv_lora_rank, preset.qk_head_dim, preset.v_head_dim) == (512, *heads)
    assert preset.qk_pos_emb_head_dim == 64
    assert preset.latent_norm_eps == 1e-6
    assert len(preset.moe_layer_freq) == preset.num_layers


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("factor", [1, 2, 3, 8, 16, 64, 1000])
def test_scaled_models_stay_valid(name, factor):
    preset = get_preset(name)
    small = scale_down(preset, factor)
    assert len(small.moe_layer_freq) == small.num_layers
    assert set(small.moe_layer_freq) == {0, 1}
    assert small.num_attention_heads % 4 == 0
    assert small.qk_pos_emb_head_dim % 2 == 0
    assert 1 <= small.moe_router_topk <= small.num_moe_experts
    assert (small.q_lora_rank is None) == (preset.q_lora_rank is None)
    assert small.hidden_size <= preset.hidden_size
    args = parse_arguments(["--preset", name, "--scale-down", str(factor)])
    config = build_config(args, resolve_model(args), torch.device("cpu"))
    assert config.experimental_attention_variant == preset.experimental_attention_variant
    if preset.experimental_attention_variant:
        dsa = DSAConfig.from_config(config)
        assert 4 <= dsa.num_heads <= preset.dsa_indexer_n_heads
        assert 16 <= dsa.topk <= preset.dsa_indexer_topk
        assert dsa.head_dim > small.qk_pos_emb_head_dim


def test_scaling_by_one_changes_nothing():
    assert scale_down(get_preset("deepseek-v3"), 1) == get_preset("deepseek-v3")


def test_sizes_override_the_preset():
    model = _resolve("--num-layers", "4", "--hidden-size", "64", "--q-lora-rank", "0")
    assert (model.num_layers, model.hidden_size, model.q_lora_rank) == (4, 64, None)
    assert model.moe_layer_freq == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("argv", "cp_comm_type", "varies"),
    [
        ("--context-parallel-size 2", "all_gather", False),
        ("--context-parallel-size 2 --cp-comm-type p2p --packed", "p2p", False),
        (
            "--context-parallel-size 2 --num-layers 2 --cp-comm-type p2p all_gather "
            "--pipeline-model-parallel-size 2 --packed --num-experts 0",
            ["p2p", "all_gather"],
            True,
        ),
        ("--pipeline-model-parallel-size 3 --packed", "all_gather", False),
    ],
)
def test_megatron_is_told_of_context_parallelism(argv, cp_comm_type, varies):
    args = parse_arguments(argv.split())
    config = build_config(args, resolve_model(args), torch.device("cpu"))
    assert config.context_parallel_size == args.context_parallel_size
    assert config.cp_comm_type == cp_comm_type
    assert config.variable_seq_lengths == varies


def test_no_experts_make_a_dense_model():
    model = _resolve("--num-experts", "0")
    assert model.num_moe_experts is None
    assert model.moe_layer_freq == ()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preset", "gpt-2"], "--preset must be one of tiny"),
        (["--scale-down", "0"], "--scale-down must be at least 1, got 0"),
        (["--num-layers", "0"], "--num-layers must be above 0, got 0"),
        (["--kv-lora-rank", "-1"], "--kv-lora-rank must be above 0, got -1"),
        (["--qk-pos-emb-head-dim", "7"], "--qk-pos-emb-head-dim must be even, got 7"),
        (["--moe-layer-freq", "[0,1]"], "one entry for each of --num-layers 3, got 2"),
        (
            ["--moe-router-topk", "9"],
            "--moe-router-topk must be at most num_experts of the preset tiny, 4, got 9",
        ),
        (["--preset", "deepseek-v3", "--num-experts", "100"], "8 routing groups, got 100"),
    ],
)
def test_bad_sizes_name_the_option(argv, message):
    with pytest.raises(ValueError) as error:
        _resolve(*argv)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        ("1", 3, (1, 1, 1)),
        ("2", 4, (1, 0, 1, 0)),
        ("([0]*1+[1]*2)", 3, (0, 1, 1)),
        ("2*[0]+[1]", 3, (0, 0, 1)),
        ("[0, 1]*2", 4, (0, 1, 0, 1)),
    ],
)
def test_moe_patterns(text, layers, expected):
    assert moe_layers(parse_moe_layer_freq(text), layers) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "[2]", "[]", "x", "__import__('os')", "[0]*10**9", "[0]+1"]
)
def test_other_moe_patterns_are_errors(text):
    with pytest.raises(ValueError, match="--moe-layer-freq"):
        parse_moe_layer_freq(text)


def test_vocabulary():
    args = parse_arguments([])
    assert padded_vocab_size(args, get_preset("tiny"), 257) == 320
    args = parse_arguments(["--preset", "deepseek-v3"])
    assert padded_vocab_size(args, get_preset("deepseek-v3"), 257) == 129280
    args = parse_arguments(["--preset", "deepseek-v3", "--scale-down", "8"])
    assert padded_vocab_size(args, get_preset("deepseek-v3"), 257) == 320
    args = parse_arguments(["--vocab-size", "100"])
    with pytest.raises(ValueError, match="at least the tokenizer's 257, got 100"):
        padded_vocab_size(args, get_preset("tiny"), 257)
