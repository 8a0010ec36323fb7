"""Presets, their scaling, and single sizes on the command line of scripts/train.py."""

from __future__ import annotations

import re

import pytest

from absorbed_mla.dims import MLADims, softmax_scale
from absorbed_mla.dsa.config import DSAConfig
from checkpoint_conversion.moe_pattern import moe_layers, parse_moe_layer_freq
from tests.support.train_arguments import checked, resolved, resolved_from, saved
from training import arguments, options
from training.arguments import FREE, model_of, parse_arguments, set_vocabulary
from training.model import model_config
from training.options import flag_of
from training.presets import COMMON, PRESETS, get_preset, scale_down

_SCALES = {
    "deepseek-v2-lite": 0.1147214,
    "deepseek-v3": 0.1352338,
    "deepseek-v3.2": 0.1352338,
    "glm-5": 0.0625,
    "kimi-k2": 0.1308608,
    "moonlight": 0.0721688,
}


def config_of(line: str, world_size: int = 1):
    return model_config(checked(line, world_size)).transformer


class TestPresets:
    @pytest.mark.parametrize("name", _SCALES)
    def test_softmax_scale_of_the_released_models(self, name):
        config = config_of(f"--preset {name}")
        scale = softmax_scale(config, MLADims.from_config(config, 1))
        assert scale == pytest.approx(_SCALES[name], rel=1e-6)

    @pytest.mark.parametrize("name", _SCALES)
    def test_released_models_have_the_released_shape(self, name):
        preset = get_preset(name)
        heads = (192, 256) if name == "glm-5" else (128, 128)
        names = ("kv_lora_rank", "qk_head_dim", "v_head_dim", "qk_pos_emb_head_dim")
        assert tuple(preset[name] for name in names) == (512, *heads, 64)
        assert preset["latent_norm_epsilon"] == 1e-6
        assert len(preset["moe_layer_freq"]) == preset["num_layers"]
        assert preset.keys() == COMMON.keys()

    @pytest.mark.parametrize("name", PRESETS)
    @pytest.mark.parametrize("factor", [1, 2, 3, 8, 16, 64, 1000])
    def test_scaled_models_stay_valid(self, name, factor):
        preset = get_preset(name)
        small = scale_down(preset, factor)
        assert len(small["moe_layer_freq"]) == small["num_layers"]
        assert set(small["moe_layer_freq"]) == {0, 1}
        assert small["num_attention_heads"] % 4 == 0
        assert small["qk_pos_emb_head_dim"] % 2 == 0
        assert 1 <= small["moe_router_topk"] <= small["num_experts"]
        assert (small["q_lora_rank"] is None) == (preset["q_lora_rank"] is None)
        assert small["hidden_size"] <= preset["hidden_size"]
        variant = preset["experimental_attention_variant"]
        config = config_of(f"--preset {name} --scale-down {factor}")
        assert config.experimental_attention_variant == variant
        if variant:
            dsa = DSAConfig.from_config(config)
            assert 4 <= dsa.num_heads <= preset["dsa_indexer_n_heads"]
            assert 16 <= dsa.topk <= preset["dsa_indexer_topk"]
            assert dsa.head_dim > small["qk_pos_emb_head_dim"]

    def test_scaling_by_one_changes_nothing(self):
        assert scale_down(get_preset("deepseek-v3"), 1) == get_preset("deepseek-v3")


class TestSizes:
    def test_override_the_preset(self):
        model = model_of(resolved("--num-layers 4 --hidden-size 64 --q-lora-rank 0"))
        assert (model["num_layers"], model["hidden_size"], model["q_lora_rank"]) == (4, 64, None)
        assert model["moe_layer_freq"] == [0, 0, 1, 1]

    def test_no_experts_make_a_dense_model(self):
        model = model_of(resolved("--num-experts 0"))
        assert (model["num_experts"], model["moe_layer_freq"]) == (None, 1)
        assert model_of(resolved("--moe-layer-freq [0,0,0]")) == model
        assert config_of("--num-experts 0").num_moe_experts is None

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("--preset gpt-2", "--preset must be one of tiny"),
            ("--scale-down 0", "--scale-down must be at least 1, got 0"),
            ("--num-layers 0", "--num-layers must be above 0, got 0"),
            ("--kv-lora-rank -1", "--kv-lora-rank must be above 0, got -1"),
            ("--qk-pos-emb-head-dim 7", "--qk-pos-emb-head-dim must be even, got 7"),
            ("--moe-layer-freq [0,1]", "one entry for each of --num-layers 3, got 2"),
            ("--num-experts 0 --moe-layer-freq __import__('os')", None),
            (
                "--moe-router-topk 9",
                "--moe-router-topk must be at most num_experts of the preset tiny, 4, got 9",
            ),
            ("--preset deepseek-v3 --num-experts 100", "8 routing groups, got 100"),
        ],
    )
    def test_bad_sizes_name_the_option(self, line, message):
        if message is None:
            assert model_of(resolved(line))["moe_layer_freq"] == 1
            return
        with pytest.raises(ValueError, match=re.escape(message)):
            resolved(line)

    @pytest.mark.parametrize(
        ("line", "world_size", "cp_comm_type", "varies"),
        [
            ("--context-parallel-size 2", 2, "all_gather", False),
            ("--context-parallel-size 2 --cp-comm-type p2p --packed", 2, "p2p", False),
            (
                "--context-parallel-size 2 --num-layers 2 --cp-comm-type p2p all_gather "
                "--pipeline-model-parallel-size 2 --packed --num-experts 0",
                4,
                ["p2p", "all_gather"],
                True,
            ),
            ("--pipeline-model-parallel-size 3 --packed", 3, "all_gather", False),
            ("--context-parallel-size 2 --cp-comm-type auto", 2, "auto", False),
            (
                "--context-parallel-size 2 --cp-comm-type auto p2p auto",
                2,
                ["auto", "p2p", "auto"],
                False,
            ),
            # Megatron's config accepts all of them, but not "auto" with sparse attention.
            (
                "--preset deepseek-v3.2 --scale-down 16 --num-layers 3 --context-parallel-size 2 "
                "--cp-comm-type auto",
                2,
                "all_gather",
                False,
            ),
        ],
    )
    def test_megatron_is_told_of_context_parallelism(self, line, world_size, cp_comm_type, varies):
        config = config_of(line, world_size)
        assert config.context_parallel_size == (2 if "context" in line else 1)
        assert config.cp_comm_type == cp_comm_type
        assert config.variable_seq_lengths == varies


class TestMoePatterns:
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
    def test_accepted(self, text, layers, expected):
        assert moe_layers(parse_moe_layer_freq(text), layers) == expected

    @pytest.mark.parametrize(
        "text", ["", "0", "-1", "[2]", "[]", "x", "__import__('os')", "[0]*10**9", "[0]+1"]
    )
    def test_others_are_errors(self, text):
        with pytest.raises(ValueError, match="--moe-layer-freq"):
            resolved(["--moe-layer-freq", text])


class TestVocabulary:
    @pytest.mark.parametrize(
        ("line", "tokens", "expected"),
        [
            ("", 257, 320),
            ("--preset deepseek-v3", 257, 129280),
            ("--preset deepseek-v3 --scale-down 8", 257, 320),
            ("--make-vocab-size-divisible-by 300", 257, 300),
            ("--vocab-size 400", 257, 448),
        ],
    )
    def test_rows(self, line, tokens, expected):
        assert checked(line, tokens=tokens).padded_vocab_size == expected

    def test_smaller_than_the_tokenizers(self):
        with pytest.raises(ValueError, match="at least the tokenizer's 257, got 100"):
            checked("--vocab-size 100")

    def test_of_a_checkpoint(self, monkeypatch):
        args = resolved_from(saved(padded_vocab_size=999), monkeypatch)
        with pytest.raises(ValueError, match="at least the tokenizer's 1000, got 999"):
            set_vocabulary(args, 1000)
        set_vocabulary(args, 257)
        assert args.padded_vocab_size == 999


class TestCommandLine:
    @pytest.mark.parametrize(
        "line", ["--unknown", "--form fast", "--lr x", "--attention", "--fp8-recipe x"]
    )
    def test_argparse_errors_are_value_errors(self, line):
        with pytest.raises(ValueError, match="--help lists all options"):
            parse_arguments(line.split())

    def test_every_option_of_megatrons_is_known_without_importing_it(self):
        parser = arguments._megatron_parser()
        flags = {flag for action in parser._actions for flag in action.option_strings}
        options.require_known(flag for flag in flags if flag.startswith("--"))

    def test_its_defaults_are_shown(self):
        text = options.own_parser().format_help()
        for name, value in options.DEFAULTS.items():
            shown = " ".join(value) if isinstance(value, list) else value
            assert f"{flag_of(name)} {shown}" in text
            assert getattr(parse_arguments([]), name) == value

    def test_every_size_of_the_model_has_an_option(self):
        parser = arguments._megatron_parser()
        without = COMMON.keys() - {action.dest for action in parser._actions}
        assert without == {
            *("original_max_position_embeddings", "beta_fast", "beta_slow"),
            *("moe_router_group_score_topk", "moe_router_norm_topk_prob"),
        }

    @pytest.mark.parametrize(
        "words",
        [
            "--preset tiny",
            "--scale-down 1",
            "--hidden-size 128",
            "--q-lora-rank 0",
            "--vocab-size 320",
            "--make-vocab-size-divisible-by 64",
            "--rope-type rope",
            "--num-experts 0",
            "--moe-layer-freq 1",
        ],
    )
    def test_the_model_cannot_be_said_twice(self, words):
        with pytest.raises(ValueError) as error:
            parse_arguments(["--use-checkpoint-args", "--load", "x", *words.split()])
        excluded = f"takes the model from --load and excludes {words.split()[0]};"
        assert f"--use-checkpoint-args {excluded}" in str(error.value)

    def test_options_that_go_with_a_checkpoints_model(self):
        assert {"max_position_embeddings", "moe_aux_loss_coeff", "latent_norm_epsilon"} == FREE
        for name in FREE:
            parse_arguments(["--use-checkpoint-args", "--load", "x", flag_of(name), "1"])

    def test_checkpoint_args_need_a_checkpoint(self):
        with pytest.raises(ValueError, match="--use-checkpoint-args needs --load"):
            parse_arguments(["--use-checkpoint-args"])
