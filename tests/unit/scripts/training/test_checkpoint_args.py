"""The model in scripts/train.py's checkpoints, and --use-checkpoint-args."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.router import TopKRouter

from absorbed_mla.deepseek_router import DeepSeekRouter
from absorbed_mla.moe_layer import NormedMoE
from absorbed_mla.options import ROUTER_OPTIONS
from checkpoint_conversion.formats.vocabulary_padding import check_padding
from checkpoint_conversion.megatron_args import from_megatron_args, to_megatron_args
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.verify import config_differences
from tests.conversion.released import RELEASED
from tests.conversion.support import AXK1, MISTRAL4, V2_LITE, tiny_config
from tests.support.refusal import refusal
from tests.support.train_arguments import checked, resolved_from, saved
from training.arguments import model_of, set_vocabulary
from training.checkpoint import load_model_args
from training.checkpoint_args import model_from_args
from training.checks import validate_arguments
from training.model import build_gpt, model_config
from training.options import flag_of
from training.presets import PRESETS, get_preset
from training.refusals import FREE

_MODELS = [
    *(f"--preset {name}" for name in PRESETS),
    *(f"--preset {name} --scale-down 16" for name in PRESETS),
    "--num-experts 0",
    "--num-layers 4 --moe-layer-freq [1,1,0,0] --q-lora-rank 0",
    "--norm-epsilon 1e-5 --latent-norm-epsilon 1e-4 --rotary-base 500000",
]


@pytest.mark.parametrize("line", _MODELS)
def test_a_saved_model_is_restored_in_every_field(line):
    assert model_from_args(saved(line)) == model_of(checked(line))


@pytest.mark.parametrize("name", RELEASED)
def test_a_converted_model_is_the_preset(name):
    args = to_megatron_args(
        ModelConfig.from_hugging_face({**RELEASED[name], "num_nextn_predict_layers": 0})
    )
    model, preset = model_from_args(args), get_preset(name)
    preset["moe_router_topk_scaling_factor"] = preset["moe_router_topk_scaling_factor"] or 1.0
    assert model | {"moe_aux_loss_coeff": preset["moe_aux_loss_coeff"]} == preset


@pytest.mark.parametrize("name", RELEASED)
def test_the_conversion_understands_what_is_saved(name):
    expected = ModelConfig.from_hugging_face({**RELEASED[name], "num_nextn_predict_layers": 0})
    config = from_megatron_args(saved(f"--preset {name} --bf16"))
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
    args = resolved_from(converted, monkeypatch, f"--attention {attention}")
    model, wanted = model_of(args), dict(zip(ROUTER_OPTIONS, expected))
    assert {name: model[name] for name in wanted} == wanted
    args.seq_length = args.max_position_embeddings
    validate_arguments(args)
    set_vocabulary(args, 1)
    gpt = build_gpt(model_config(args), torch.device("cpu"))
    routers = [m for m in gpt.modules() if isinstance(m, TopKRouter)]
    assert len(routers) == 2
    for router in routers:
        assert type(router) is DeepSeekRouter
        assert {name: getattr(router.options, name) for name in wanted} == wanted
    assert model_from_args(args) == model


@pytest.mark.parametrize("attention", ["absorbed", "standard"])
def test_a_converted_models_norm_comes_along(monkeypatch, attention):
    converted = to_megatron_args(tiny_config(**{**AXK1, "num_nextn_predict_layers": 0}))
    args = resolved_from(converted, monkeypatch, f"--attention {attention} --seq-length 32")
    validate_arguments(args)
    set_vocabulary(args, 1)
    gpt = build_gpt(model_config(args), torch.device("cpu"))
    kinds = [type(layer.mlp) for layer in gpt.decoder.layers]
    assert kinds == [MLP, NormedMoE, NormedMoE]
    assert model_from_args(args) == model_of(args)


def test_a_converted_models_scaling_comes_along(monkeypatch):
    config = tiny_config(**MISTRAL4)
    converted = to_megatron_args(config)
    args = resolved_from(converted, monkeypatch)
    model = model_of(args)
    assert (model["llama_4_scaling_beta"], model["moe_router_norm_topk_prob"]) == (0.1, True)
    args.seq_length = args.max_position_embeddings
    validate_arguments(args)
    set_vocabulary(args, 1)
    gpt = build_gpt(model_config(args), torch.device("cpu"))
    assert {layer.self_attention.query_scaling.beta for layer in gpt.decoder.layers} == {0.1}
    assert model_from_args(args) == model
    assert config_differences(config, from_megatron_args(args)) == {}
    standard = resolved_from(converted, monkeypatch, "--attention standard --seq-length 33")
    with refusal("--attention must be absorbed", "--seq-length above 32, got standard"):
        validate_arguments(standard)
    standard.seq_length = 32
    validate_arguments(standard)


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
        model_from_args(Namespace(**converted))
    said = tiny_config(**_V2_GROUPS, moe_router_group_score_topk=2)
    model = model_from_args(to_megatron_args(said))
    assert model["moe_router_group_score_topk"] is None, "Megatron's choice, as it was trained"
    # Megatron's own training, which knows no epsilon of latent norms either.
    del converted["latent_norm_epsilon"]
    assert model_from_args(Namespace(**converted))["moe_router_group_score_topk"] is None


def _vocabulary(saved: Namespace) -> tuple:
    names = ("vocab_size", "make_vocab_size_divisible_by", "padded_vocab_size")
    return tuple(getattr(saved, name) for name in names)


def test_padding_of_the_vocabulary_is_known():
    """The conversion drops it without being asked, but no row that is a token."""
    there = checked("", tokens=257)
    assert _vocabulary(there) == (None, 64, 320)
    assert from_megatron_args(there).vocab_size == 320, "without a config.json all rows count"
    [note] = check_padding(257, 63, {}, vars(there), drop_tokens=False)
    assert note == "63 rows of padding after the vocabulary are dropped"
    with refusal("70 rows", "padding to a multiple of 64"):
        check_padding(250, 70, {}, vars(there), drop_tokens=False)
    there = checked("", tokens=320)
    assert _vocabulary(there) == (320, 64, 320)
    with refusal("63 rows", "arguments have a vocab_size of 320"):
        check_padding(257, 63, {}, vars(there), drop_tokens=False)


@pytest.mark.parametrize("padded", [64, 128])
def test_the_vocabulary_of_a_loaded_checkpoint(monkeypatch, padded):
    """Training changes nothing of what it says."""
    converted = to_megatron_args(tiny_config(vocab_size=64), padded_vocab_size=padded)
    args = resolved_from(converted, monkeypatch)
    set_vocabulary(args, 60)
    assert _vocabulary(args) == (64, None, padded)


def test_what_megatrons_own_training_saves():
    """One epsilon for all norms, and a list of coefficients of balancing."""
    there = saved("--norm-epsilon 1e-5", moe_aux_loss_coeff=[0.01])
    del there.latent_norm_epsilon
    model = model_from_args(there)
    assert (model["latent_norm_epsilon"], model["moe_aux_loss_coeff"]) == (1e-5, 0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multi_latent_attention": False}, "args.multi_latent_attention must be True, got False"),
        ({"untie_embeddings_and_output_weights": False}, "args.untie_embeddings_and_output_weight"),
        ({"mtp_num_layers": 1}, "args.mtp_num_layers must be 0 (--exclude-mtp"),
        ({"hidden_size": "128"}, "args.hidden_size must be an integer"),
        ({"num_layers": None}, "args.num_layers is missing"),
        ({"moe_layer_freq": "([0]*9)"}, "--moe-layer-freq must have one entry for each"),
        (
            {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False}
            | {"moe_router_norm_topk_prob": True},
            "args.moe_router_pre_softmax must be true with softmax",
        ),
        ({"use_mup": True}, "args.use_mup must be left out, got True"),
        ({"rope_factors": (1.0,)}, "args.rope_factors must be left out, got (1.0,)"),
        ({"moe_router_group_topk": 1}, "args.moe_router_num_groups is missing"),
    ],
)
def test_models_that_cannot_be_trained(change, message):
    with refusal(message):
        model_from_args(saved(**change))


def test_the_checkpoint_says_what_the_model_is(monkeypatch):
    line = "--preset moonlight --scale-down 16 --num-layers 5"
    there = saved(line, padded_vocab_size=999)
    restored = model_of(resolved_from(there, monkeypatch))
    assert restored == model_of(checked(line)) | {"vocab_size": 999}


def test_what_is_no_part_of_the_model_may_be_given(monkeypatch):
    there, own = saved(), dict.fromkeys(FREE, 0.5) | {"max_position_embeddings": 8192}
    flags = " ".join(f"{flag_of(name)} {value}" for name, value in own.items())
    assert model_of(resolved_from(there, monkeypatch, flags)) == model_of(there) | own
    with refusal("--max-position-embeddings must be above 0"):
        resolved_from(there, monkeypatch, "--max-position-embeddings 0")
    with refusal("at most num_experts of the checkpoint in --load, 4, got 9"):
        resolved_from(saved(moe_router_topk=9), monkeypatch)


def _save_checkpoint(folder: Path, **common: object) -> str:
    folder.mkdir()
    weight = ShardedTensor.from_rank_offsets("weight", torch.ones(2))
    dist_checkpointing.save({"weight": weight, **common}, str(folder))
    return str(folder)


def test_arguments_are_read_from_a_checkpoint(tmp_path):
    plain = ("num_layers", "hidden_size", "moe_layer_freq")
    there = Namespace(**{name: getattr(checked(""), name) for name in plain})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    folder = _save_checkpoint(tmp_path / "release", args=there)
    assert load_model_args(str(tmp_path)) == load_model_args(folder) == there
    with refusal("iter_0000001 contains no arguments that describe its model"):
        load_model_args(_save_checkpoint(tmp_path / "iter_0000001", iteration=1))
