"""A config.json of another router than the checkpoint was trained with, which no weight shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.megatron_args import to_megatron_args
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.router_comparison import refuse_another_router
from checkpoint_conversion.routing import ROUTER_OPTIONS
from checkpoint_conversion.verify import verify
from tests.conversion.released import RELEASED
from tests.conversion.support import (
    CONFIGS,
    V2_LITE,
    hugging_face_config,
    random_tensors,
    refused,
    tiny_config,
    write_model,
    write_torch_dist,
)

GROUPS = {
    **V2_LITE,
    "topk_method": "group_limited_greedy",
    "n_routed_experts": 16,
    "n_group": 8,
    "topk_group": 3,
    "num_experts_per_tok": 6,
}
DIFFERS = "group_score_topk is 1, in the model 2"


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Writes a checkpoint with a config.json and the arguments of a Megatron without our two."""

    def write(changes: dict, **changed: object) -> Path:
        config = tiny_config(**changes)
        write_torch_dist(tmp_path / "trained", config, random_tensors(config))
        args = {**vars(to_megatron_args(config)), **changed}
        args = {name: value for name, value in args.items() if name not in ROUTER_OPTIONS}
        monkeypatch.setattr("checkpoint_conversion.formats.torch_dist.arguments", lambda _: args)
        return tmp_path / "trained"

    return write


def test_it_is_not_converted(trained, tmp_path):
    """With its own config.json, with one of --hf-config, and without any: always refused."""
    source, config = trained(GROUPS), tmp_path / "config.json"
    config.write_text(json.dumps(hugging_face_config(**GROUPS)))
    own = source / "release/hugging_face/config.json"
    for given, named in ((None, own), (config, config)):
        with refused(f"another router than {named}", "--hf-config", DIFFERS):
            convert(source, tmp_path / "target", "hf", hf_config=given)
    own.unlink()
    with refused("moe_router_group_score_topk is 2"):
        convert(source, tmp_path / "target", "hf")
    assert not (tmp_path / "target").exists()


def test_it_is_not_verified(trained, tmp_path):
    original = write_model(tmp_path / "original", **GROUPS)
    with refused(DIFFERS):
        verify(trained(GROUPS), original, logits=False)


def test_a_config_that_says_so(trained, tmp_path):
    source, config = trained(GROUPS), tmp_path / "config.json"
    config.write_text(json.dumps(hugging_face_config(**GROUPS, moe_router_group_score_topk=2)))
    found = open_checkpoint(source, hf_config=config)
    assert found.config.hugging_face["moe_router_group_score_topk"] == 2
    convert(source, tmp_path / "target", "absorbed", hf_config=config)
    with refused("moe_router_group_score_topk is 2: no model"):
        convert(source, tmp_path / "hf", "hf", hf_config=config)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"moe_router_topk": 4}, "num_experts_per_tok is 2, in the model 4"),
        ({"moe_router_topk_scaling_factor": 1.5}, "routed_scaling_factor is 2.5, in the model 1.5"),
        ({"moe_router_group_topk": None}, "n_group is 2, in the model 1"),
        ({"moe_router_score_function": "softmax"}, "moe_router_enable_expert_bias must be False"),
    ],
)
def test_other_differences(trained, changed, message):
    with refused(message):
        open_checkpoint(trained({}, **changed))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_router(trained, name):
    """Arguments of Megatron's own training are enough where its router is the model's."""
    assert open_checkpoint(trained(CONFIGS[name])).config.hugging_face


@pytest.mark.parametrize("name", RELEASED)
def test_released_models(name):
    config = ModelConfig.from_hugging_face(RELEASED[name])
    refuse_another_router(config, vars(to_megatron_args(config)), "never")


@pytest.mark.parametrize("args", [{}, {"num_experts": 16}, {"moe_router_topk": 6}])
def test_arguments_that_do_not_say(trained, monkeypatch, args):
    source = trained(GROUPS)
    monkeypatch.setattr("checkpoint_conversion.formats.torch_dist.arguments", lambda _: args)
    assert open_checkpoint(source).config.num_experts == 16
