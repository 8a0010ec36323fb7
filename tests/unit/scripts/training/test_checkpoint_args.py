"""The model in scripts/train.py's checkpoints, and --use-checkpoint-args."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.moe.router import TopKRouter

from absorbed_mla.deepseek_router import DeepSeekRouter
from absorbed_mla.options import ROUTER_OPTIONS
from checkpoint_conversion.formats.vocabulary import check_padding
from checkpoint_conversion.megatron_args import from_megatron_args, to_megatron_args
from checkpoint_conversion.model import ModelConfig
from tests.conversion.released import RELEASED
from tests.conversion.support import V2_LITE, tiny_config
from tests.support.refusal import refusal
from training.arguments import parse_arguments
from training.checkpoint_args import checkpoint_args, preset_from_args
from training.model import build_config, build_model, unwrap
from training.model_options import (
    NOT_WITH_CHECKPOINT_ARGS,
    padded_vocab_size,
    resolve_model,
    vocab_size,
)
from training.options_named import flag_of
from training.presets import PRESETS, ModelPreset, get_preset
from training.start import load_model_args

_MODELS = [
    *(["--preset", name] for name in PRESETS),
    *(["--preset", name, "--scale-down", "16"] for name in PRESETS),
    ["--num-experts", "0"],
    ["--num-layers", "4", "--moe-layer-freq", "[1,1,0,0]", "--q-lora-rank", "0"],
    ["--norm-epsilon", "1e-5", "--latent-norm-epsilon", "1e-4", "--rotary-base", "500000"],
]


def _saved(*argv: str) -> tuple[Namespace, object]:
    args = parse_arguments(list(argv))
    model = resolve_model(args)
    return checkpoint_args(args, model, model.vocab_size), model


@pytest.mark.parametrize("argv", _MODELS, ids=" ".join)
def test_a_saved_model_is_restored_in_every_field(argv):
    saved, model = _saved(*argv)
    assert preset_from_args(saved) == model


@pytest.mark.parametrize("name", RELEASED)
def test_a_converted_model_is_the_preset(name):
    args = to_megatron_args(
        ModelConfig.from_hugging_face({**RELEASED[name], "num_nextn_predict_layers": 0})
    )
    preset = get_preset(name)
    scale = preset.moe_router_topk_scaling_factor or 1.0
    expected = preset.replace(moe_router_topk_scaling_factor=scale)
    coefficient = expected.moe_aux_loss_coeff
    assert preset_from_args(args).replace(moe_aux_loss_coeff=coefficient) == expected


@pytest.mark.parametrize("name", RELEASED)
def test_the_conversion_understands_what_is_saved(name):
    saved, _ = _saved("--preset", name, "--bf16")
    expected = ModelConfig.from_hugging_face({**RELEASED[name], "num_nextn_predict_layers": 0})
    config = from_megatron_args(saved)
    assert vars(config) == {
        **vars(expected),
        "model_type": config.model_type,
        "hugging_face": config.hugging_face,
    }
    assert config.dtype == torch.bfloat16


_V2_GROUPS = {
    **V2_LITE,
    "q_lora_rank": 16,
    "topk_method": "group_limited_greedy",
    "n_routed_experts": 16,
    "n_group": 8,
    "topk_group": 3,
    "num_experts_per_tok": 6,
}


@pytest.mark.parametrize("attention", ["absorbed", "standard"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (_V2_GROUPS, (1, None)),
        ({"norm_topk_prob": False}, (None, False)),
        ({"num_experts_per_tok": 1}, (2, True)),
    ],
)
def test_a_converted_models_routing_comes_along(monkeypatch, changes, expected, attention):
    """Into the model that is trained, and into what its training saves."""
    converted = to_megatron_args(tiny_config(**changes))
    args, preset = _resolve_from(converted, monkeypatch, "--attention", attention)
    wanted = dict(zip(ROUTER_OPTIONS, expected))
    assert {name: getattr(preset, name) for name in wanted} == wanted
    config = build_config(args, preset, torch.device("cpu"))
    gpt = unwrap(build_model(args, config, preset, torch.device("cpu")))
    routers = [m for m in gpt.modules() if isinstance(m, TopKRouter)]
    assert len(routers) == 2
    for router in routers:
        assert type(router) is DeepSeekRouter
        assert {name: getattr(router.options, name) for name in wanted} == wanted
    assert preset_from_args(checkpoint_args(args, preset, preset.vocab_size)) == preset


def test_a_routing_that_is_not_said():
    """Of a converter without these options: Megatron's choice would not be the model's."""
    converted = vars(to_megatron_args(tiny_config(**_V2_GROUPS)))
    for name in ROUTER_OPTIONS:
        del converted[name]
    with refusal(
        "moe_router_group_score_topk is missing; it must be None",
        "convert the original again",
        '"moe_router_group_score_topk" is 2',
    ):
        preset_from_args(Namespace(**converted))
    said = tiny_config(**_V2_GROUPS, moe_router_group_score_topk=2)
    preset = preset_from_args(to_megatron_args(said))
    assert preset.moe_router_group_score_topk is None, "Megatron's choice, as it was trained"
    # Megatron's own training, which knows no epsilon of latent norms either.
    del converted["latent_norm_epsilon"]
    assert preset_from_args(Namespace(**converted)).moe_router_group_score_topk is None


def _saved_vocabulary(args: Namespace, tokens: int) -> tuple[Namespace, tuple]:
    """Of a training with a tokenizer of so many tokens."""
    preset = args.model.replace(vocab_size=padded_vocab_size(args, args.model, tokens))
    saved = checkpoint_args(args, preset, vocab_size(args, args.model, tokens))
    names = ("vocab_size", "make_vocab_size_divisible_by", "padded_vocab_size")
    return saved, tuple(getattr(saved, name) for name in names)


def test_padding_of_the_vocabulary_is_known():
    """The conversion drops it without being asked, but no row that is a token."""
    args = parse_arguments([])
    args.model = resolve_model(args)
    saved, found = _saved_vocabulary(args, 257)
    assert found == (None, 64, 320)
    assert from_megatron_args(saved).vocab_size == 320, "without a config.json all rows count"
    [note] = check_padding(257, 63, {}, vars(saved), drop_tokens=False)
    assert note == "63 rows of padding after the vocabulary are dropped"
    with refusal("70 rows", "padding to a multiple of 64"):
        check_padding(250, 70, {}, vars(saved), drop_tokens=False)
    saved, found = _saved_vocabulary(args, 320)
    assert found == (320, 64, 320)
    with refusal("63 rows", "arguments have a vocab_size of 320"):
        check_padding(257, 63, {}, vars(saved), drop_tokens=False)


@pytest.mark.parametrize("padded", [64, 128])
def test_the_vocabulary_of_a_loaded_checkpoint(monkeypatch, padded):
    """Training changes nothing of what it says."""
    converted = to_megatron_args(tiny_config(vocab_size=64), padded_vocab_size=padded)
    args, model = _resolve_from(converted, monkeypatch)
    args.model = model
    assert _saved_vocabulary(args, 60)[1] == (64, None, padded)


def test_megatrons_own_models_have_one_epsilon():
    saved, _ = _saved("--norm-epsilon", "1e-5")
    del saved.latent_norm_epsilon
    assert preset_from_args(saved).latent_norm_eps == 1e-5


def test_balancing_as_megatrons_command_line_gives_it():
    saved, _ = _saved()
    saved.moe_aux_loss_coeff = [0.01]
    assert preset_from_args(saved).moe_aux_loss_coeff == 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multi_latent_attention": False}, "args.multi_latent_attention must be True, got False"),
        ({"untie_embeddings_and_output_weights": False}, "args.untie_embeddings_and_output_weight"),
        ({"mtp_num_layers": 1}, "args.mtp_num_layers must be 0 (--exclude-mtp"),
        ({"hidden_size": "128"}, "args.hidden_size must be an integer"),
        ({"num_layers": None}, "args.num_layers is missing"),
        ({"moe_layer_freq": "([0]*9)"}, "--moe-layer-freq must have one entry for each"),
        ({"moe_router_score_function": "softmax", "moe_router_pre_softmax": False}, "pre_softmax"),
        ({"moe_router_group_topk": 1}, "args.moe_router_num_groups is missing"),
    ],
)
def test_models_that_cannot_be_trained(change, message):
    saved, _ = _saved()
    with pytest.raises(ValueError) as error:
        preset_from_args(Namespace(**{**vars(saved), **change}))
    assert message in str(error.value)


def _resolve_from(saved: Namespace, monkeypatch, *argv: str):
    monkeypatch.setattr("training.start.load_model_args", lambda folder: saved)
    args = parse_arguments(["--use-checkpoint-args", "--load", "there", *argv])
    return args, resolve_model(args)


def test_the_checkpoint_says_what_the_model_is(monkeypatch):
    saved, model = _saved("--preset", "moonlight", "--scale-down", "16", "--num-layers", "5")
    saved.padded_vocab_size = 999
    args, restored = _resolve_from(saved, monkeypatch)
    assert restored == model.replace(vocab_size=999)
    assert padded_vocab_size(args, restored, 257) == 999
    with pytest.raises(ValueError, match="at least the tokenizer's 1000, got 999"):
        padded_vocab_size(args, restored, 1000)


def test_what_is_no_part_of_the_model_may_be_given(monkeypatch):
    saved, model = _saved()
    options = {"max_position_embeddings": 8192, "moe_aux_loss_coeff": 0.5, "latent_norm_eps": 0.1}
    flags = "--max-position-embeddings 8192 --moe-aux-loss-coeff .5 --latent-norm-epsilon .1"
    _, restored = _resolve_from(saved, monkeypatch, *flags.split())
    assert restored == model.replace(**options)
    with pytest.raises(ValueError, match="--max-position-embeddings must be above 0"):
        _resolve_from(saved, monkeypatch, "--max-position-embeddings", "0")


def test_more_experts_per_token_than_experts(monkeypatch):
    saved, _ = _saved()
    saved.moe_router_topk = 9
    with pytest.raises(
        ValueError, match="at most num_experts of the checkpoint in --load, 4, got 9"
    ):
        _resolve_from(saved, monkeypatch)


@pytest.mark.parametrize(
    "argv",
    [
        ["--preset", "tiny"],
        ["--scale-down", "1"],
        ["--hidden-size", "128"],
        ["--q-lora-rank", "0"],
        ["--vocab-size", "320"],
        ["--make-vocab-size-divisible-by", "64"],
        ["--rope-type", "rope"],
        ["--num-experts", "0"],
        ["--moe-layer-freq", "1"],
    ],
    ids=" ".join,
)
def test_the_model_cannot_be_said_twice(argv):
    with pytest.raises(ValueError) as error:
        parse_arguments(["--use-checkpoint-args", "--load", "x", *argv])
    assert f"--use-checkpoint-args takes the model from --load and excludes {argv[0]};" in str(
        error.value
    )


def test_options_that_go_with_a_checkpoints_model():
    flags = {flag_of(field.name) for field in dataclasses.fields(ModelPreset)}
    assert flags - set(NOT_WITH_CHECKPOINT_ARGS) == {
        *("--max-position-embeddings", "--moe-aux-loss-coeff", "--latent-norm-epsilon")
    }


def test_checkpoint_args_need_a_checkpoint():
    with pytest.raises(ValueError, match="--use-checkpoint-args needs --load"):
        parse_arguments(["--use-checkpoint-args"])


def _save_checkpoint(folder: Path, **common: object) -> None:
    folder.mkdir()
    weight = ShardedTensor.from_rank_offsets("weight", torch.ones(2))
    dist_checkpointing.save({"weight": weight, **common}, str(folder))


def test_arguments_are_read_from_a_checkpoint(tmp_path):
    saved, _ = _saved()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    _save_checkpoint(tmp_path / "release", args=saved)
    assert load_model_args(str(tmp_path)) == saved
    assert load_model_args(str(tmp_path / "release")) == saved


def test_a_checkpoint_without_arguments(tmp_path):
    _save_checkpoint(tmp_path / "iter_0000001", iteration=1)
    with pytest.raises(
        ValueError, match="iter_0000001 contains no arguments that describe its model"
    ):
        load_model_args(str(tmp_path / "iter_0000001"))
