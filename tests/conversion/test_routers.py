"""Routers against those of transformers; notes say where Megatron's own computes otherwise.

Then a config.json of another router than the checkpoint was trained with, which no weight shows.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from absorbed_mla.deepseek_router import topk_routing
from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.megatron_args import (
    from_megatron_args,
    megatron_notes,
    model_notes,
    router_options,
    to_megatron_args,
)
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.router_comparison import refuse_another_function, routing_notes
from checkpoint_conversion.routing import ROUTER_OPTIONS, options_of, read_routing
from checkpoint_conversion.verify import verify
from tests.conversion.released import DEEPSEEK_V2_LITE, DEEPSEEK_V3, MOONLIGHT, RELEASED
from tests.conversion.support import (
    CONFIGS,
    GLM5,
    MINICPM3,
    MISTRAL4,
    V2_LITE,
    V32,
    hugging_face_config,
    random_tensors,
    refused,
    tiny_config,
    write_model,
    write_torch_dist,
)

_EXPERTS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
_V2 = {**V2_LITE, **_EXPERTS, "topk_method": "group_limited_greedy"}
_GLM = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "n_group": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_ROUTING = [
    (_EXPERTS, []),
    ({**_EXPERTS, "n_group": 1, "topk_group": 1}, []),
    ({**_EXPERTS, "n_group": 2}, []),
    (
        {**_EXPERTS, "num_experts_per_tok": 2},
        ["best 2 of each group's experts; Megatron's router by the best 1"],
    ),
    ({**_EXPERTS, "num_experts_per_tok": 6}, ["Megatron's router by the best 3"]),
    ({**_EXPERTS, "norm_topk_prob": False}, ["the model does not divide"]),
    (
        {**_EXPERTS, "num_experts_per_tok": 1},
        ["Megatron's router by the best 0", "the model does divide"],
    ),
    ({**_EXPERTS, "num_experts_per_tok": 1, "n_group": 2}, ["the model does divide"]),
    ({**_EXPERTS, "num_experts_per_tok": 1, "n_group": 2, "norm_topk_prob": False}, []),
    ({**_EXPERTS, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 8}, ["by the best 8"]),
    # Every expert, whatever the group.
    ({"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 8}, []),
    ({**V2_LITE, "n_routed_experts": 16}, []),
    (
        _V2,
        ["chooses 2 groups by the best 1 of each group's experts; Megatron's router by the best 2"],
    ),
    ({**_V2, "num_experts_per_tok": 2}, []),
    ({**_V2, "num_experts_per_tok": 1}, ["Megatron's router by the best 0"]),
    ({**_V2, "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6}, ["by the best 2"]),
    ({**_V2, "num_experts_per_tok": 2, "norm_topk_prob": True}, []),
    ({**V32, **_EXPERTS, "num_experts_per_tok": 5, "norm_topk_prob": False}, ["does not divide"]),
    ({**V32, **_EXPERTS, "num_experts_per_tok": 6}, ["by the best 3"]),
    ({**GLM5, "norm_topk_prob": False}, ["does not divide"]),
    ({**_GLM, "norm_topk_prob": False}, ["does not divide"]),
    ({**_GLM, **_EXPERTS, "num_experts_per_tok": 2}, ["by the best 1"]),
]


@pytest.mark.parametrize(("changes", "messages"), _ROUTING)
def test_routing(changes, messages):
    """Ours is transformers', and Megatron's own is where no note says that it is not."""
    config = tiny_config(**changes)
    notes = routing_notes(routing_of(config))
    assert len(notes) == len(messages)
    assert all(message in note for message, note in zip(messages, notes))
    for name, value in router_options(to_megatron_args(config)).items():
        assert (value is None) == (not any(f"({name}={value})" in note for note in notes))
    own = router_options(to_megatron_args(config))
    assert options_of(config.hugging_face) == {k: v for k, v in own.items() if v is not None}
    theirs, ours, megatrons = routed(config)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert (megatrons is not None and torch.allclose(megatrons, theirs, atol=1e-6)) == (not notes)


@pytest.mark.parametrize(("changes", "messages"), _ROUTING)
def test_routing_survives_megatrons_arguments(changes, messages):
    config = tiny_config(**changes)
    args = to_megatron_args(config)
    back = from_megatron_args(args)
    assert to_megatron_args(back) == args
    found, wanted = routing_of(back), routing_of(config)
    if wanted.n_group == 1:
        # How groups would be ranked is not in the arguments.
        assert (found.n_group, found.topk_group) == (1, 1)
    else:
        assert found == wanted
    assert found.norm_topk_prob == wanted.norm_topk_prob


def routing_of(config: ModelConfig):
    return read_routing(config.fields, config.model, config.num_experts)


def routed(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Weight of every expert for every token: transformers', ours, and Megatron's.

    Megatron's is None where it cannot choose as it is told.
    """
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    router = router_of_transformers(config)
    with torch.no_grad():
        logits, weights, chosen = router(torch.randn(200, config.hidden_size))
    theirs = torch.zeros_like(logits).scatter(1, chosen, weights)
    args = to_megatron_args(config)
    fields = {
        "use_pre_softmax": args.moe_router_pre_softmax,
        "num_groups": args.moe_router_num_groups,
        "group_topk": args.moe_router_group_topk,
        "scaling_factor": args.moe_router_topk_scaling_factor,
        "score_function": args.moe_router_score_function,
        "expert_bias": getattr(router, "e_score_correction_bias", None),
    }
    own = {name.removeprefix("moe_router_"): x for name, x in router_options(args).items()}
    ours, chosen_map = topk_routing(logits, args.moe_router_topk, **fields, **own)
    assert torch.equal(chosen_map, theirs != 0)
    try:
        megatrons, _ = topk_routing_with_score_function(logits, args.moe_router_topk, **fields)
    except RuntimeError:
        megatrons = None
    return theirs, ours, megatrons


def router_of_transformers(config: ModelConfig) -> torch.nn.Module:
    """With random weights and, if it has one, a random bias."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    loaded = CONFIG_MAPPING[config.model_type].from_dict(config.hugging_face)
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(loaded)](loaded)
    [*_, router] = (m for m in model.modules() if type(m).__name__.endswith("TopkRouter"))
    router.to_empty(device="cpu")
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight)
    if hasattr(router, "e_score_correction_bias"):
        router.e_score_correction_bias.normal_(std=0.1)
    return router


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Transformers takes any experts of other groups then.
        ({**_EXPERTS, "topk_group": 1, "num_experts_per_tok": 5}, "at most the 4 experts of topk"),
        ({**_V2, "topk_group": 1, "num_experts_per_tok": 16}, "at most the 4 experts of topk"),
        # Transformers raises an error.
        ({**_EXPERTS, "n_group": 16, "topk_group": 8}, "at least 2 experts in a group"),
    ],
)
def test_sizes_that_do_not_fit(changes, message):
    with refused(message):
        tiny_config(**changes)
    with refused(message):
        options_of(hugging_face_config(**changes))


def test_a_field_that_transformers_ignores():
    config = tiny_config(**V2_LITE)
    assert model_notes(config) == []
    [note] = model_notes(tiny_config(**{**V2_LITE, "norm_topk_prob": True}))
    assert note.startswith("norm_topk_prob is true: transformers ignores the field in DeepSeek-V2")


def test_released_models_route_the_same():
    for name in RELEASED:
        config = ModelConfig.from_hugging_face(RELEASED[name])
        assert routing_notes(routing_of(config)) == [] == model_notes(config)
    assert megatron_notes(ModelConfig.from_hugging_face(DEEPSEEK_V3)) == []
    assert megatron_notes(ModelConfig.from_hugging_face(DEEPSEEK_V2_LITE)) == []
    (note,) = megatron_notes(ModelConfig.from_hugging_face(MOONLIGHT))
    assert note.startswith("rms_norm_eps is 1e-05: Hugging Face's norms inside the attention have")


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


def test_another_router_is_not_converted(trained, tmp_path):
    """With its own config.json, with one of --hf-config, and without any: always refused."""
    source, config = trained(GROUPS), tmp_path / "config.json"
    config.write_text(json.dumps(hugging_face_config(**GROUPS)))
    own = source / "release/hugging_face/config.json"
    for given, named in ((None, own), (config, config)):
        with refused("another router", f"than {named}", "--hf-config", DIFFERS):
            convert(source, tmp_path / "target", "hf", hf_config=given)
    own.unlink()
    with refused("moe_router_group_score_topk is 2"):
        convert(source, tmp_path / "target", "hf")
    assert not (tmp_path / "target").exists()


def test_another_router_is_not_verified(trained, tmp_path):
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
def test_other_differences_of_routers(trained, changed, message):
    with refused(message):
        open_checkpoint(trained({}, **changed))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_router(trained, name):
    """Arguments of Megatron's own training are enough where its router is the model's."""
    assert open_checkpoint(trained(CONFIGS[name])).config.hugging_face


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_their_own_router(name):
    config = ModelConfig.from_hugging_face(RELEASED[name])
    refuse_another_function(config, vars(to_megatron_args(config)), "never")


@pytest.mark.parametrize("name", ["rope_factors", "mup_embedding_mult", "use_mup"])
def test_another_minicpm3(name):
    config = tiny_config(**MINICPM3)
    args = vars(to_megatron_args(config))
    refuse_another_function(config, args, "never")
    with refused(f"{name} is", "in the model False" if name == "use_mup" else "in the model"):
        change = {"use_mup": False, "rope_factors": [1.0] * 4}.get(name, 2.0)
        refuse_another_function(config, {**args, name: change}, "differs:")


def test_another_scaling_of_queries():
    """Arguments that Megatron-LM's own training saved do not have it."""
    config = tiny_config(**MISTRAL4)
    args = vars(to_megatron_args(config))
    refuse_another_function(config, args, "never")
    with refused("llama_4_scaling_beta is 0.1, in the model None"):
        refuse_another_function(config, {**args, "llama_4_scaling_beta": None}, "differs:")
    del args["llama_4_scaling_beta"]
    refuse_another_function(config, args, "never")


@pytest.mark.parametrize("args", [{}, {"num_experts": 16}, {"moe_router_topk": 6}])
def test_arguments_that_do_not_say(trained, monkeypatch, args):
    source = trained(GROUPS)
    monkeypatch.setattr("checkpoint_conversion.formats.torch_dist.arguments", lambda _: args)
    assert open_checkpoint(source).config.num_experts == 16
