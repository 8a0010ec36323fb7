"""The router that ranks groups and normalises as it is told: a float64 router, and Megatron's."""

import pytest
import torch
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    get_default_pg_collection,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.deepseek_router import DeepSeekRouter, _ModelsChoice, topk_routing
from absorbed_mla.packed_router import PackedRouter, use_packed_router
from absorbed_mla.serving.experts.experts import GroupedExperts
from absorbed_mla.serving.experts.layer import group_experts
from specs.absorbed_mla_hybrid_specs import get_absorbed_mla_hybrid_stack_spec
from specs.absorbed_mla_layer_specs import (
    get_absorbed_mla_decoder_block_spec,
    get_absorbed_mla_layer_spec,
)
from tests.support import needs
from tests.support.cases import TINY, config_for
from tests.support.experts import ROUTED
from tests.support.models import gpt_model, logits

pytestmark = needs.no_gpu
EXPERTS, TOKENS = 8, 40
SOFTMAX = {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_pre_softmax": True,
}
# Fields of the config, options: what Megatron's router does not compute.
KINDS = {
    "V2": ({**ROUTED, **SOFTMAX, "moe_router_topk": 4}, {"moe_router_group_score_topk": 1}),
    "V3": ({**ROUTED, "moe_router_topk": 3}, {"moe_router_group_score_topk": 2}),
    "one expert": (
        {**ROUTED, "moe_router_topk": 1},
        {"moe_router_group_score_topk": 2, "moe_router_norm_topk_prob": True},
    ),
    "not normalised": (ROUTED, {"moe_router_norm_topk_prob": False}),
    "softmax, normalised": (
        {**ROUTED, **SOFTMAX},
        {"moe_router_group_score_topk": 2, "moe_router_norm_topk_prob": True},
    ),
}
kinds = pytest.mark.parametrize(("fields", "options"), KINDS.values(), ids=KINDS)


def router_of(fields: dict, options: dict, kind: type = DeepSeekRouter, **more) -> TopKRouter:
    """A router in training, with a bias that changes its choice."""
    config = config_for(TINY, torch.float32, **fields, **more)
    torch.manual_seed(1)
    given = {"options": AbsorbedMLAOptions(**options)} if kind is DeepSeekRouter else {}
    router = kind(config, pg_collection=get_default_pg_collection(), **given)
    router.set_layer_number(1)
    torch.nn.init.normal_(router.weight)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(0.3, -0.3, EXPERTS))
    return router


def tokens_of(seed: int = 0) -> Tensor:
    """Hidden states [TOKENS, 1, hidden]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, 1, TINY.hidden, generator=generator) / 4


def expected_weights(x: Tensor, router: TopKRouter, options: dict) -> Tensor:
    """Weights [TOKENS, EXPERTS] of a router written down token by token, in float64."""
    config = router.config
    scores = x.flatten(0, 1) @ router.weight.double().T
    softmax = config.moe_router_score_function == "softmax"
    scores = scores.softmax(-1) if softmax else scores.sigmoid()
    keys = scores if router.expert_bias is None else scores + router.expert_bias.double()
    size, topk = EXPERTS // config.moe_router_num_groups, config.moe_router_topk
    of_group = options.get("moe_router_group_score_topk", topk // config.moe_router_group_topk)
    normalised = options.get("moe_router_norm_topk_prob", not softmax and topk > 1)
    rows = []
    for key, score in zip(keys.tolist(), scores):
        groups = [range(first, first + size) for first in range(0, EXPERTS, size)]
        groups.sort(key=lambda group: sum(sorted(key[i] for i in group)[size - of_group :]))
        allowed = [i for group in groups[-config.moe_router_group_topk :] for i in group]
        chosen = sorted(allowed, key=lambda i: key[i])[-topk:]
        taken = torch.zeros_like(score)
        taken[chosen] = 1
        weights = score * taken
        rows.append(weights / weights.sum() if normalised else weights)
    return torch.stack(rows) * config.moe_router_topk_scaling_factor


@kinds
def test_output_and_gradients(fields, options):
    router = router_of(fields, options)
    x = tokens_of().requires_grad_()
    probs, chosen = router(x)
    exact = x.detach().double().requires_grad_()
    weight = router.weight.detach().double().requires_grad_()
    expected = expected_weights(exact, router_with(router, weight), options)
    assert torch.equal(chosen, expected != 0)
    torch.testing.assert_close(probs.double(), expected, rtol=1e-5, atol=1e-7)
    factor = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(2)).double()
    (probs * factor.float()).sum().backward()
    (expected * factor).sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(router.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-6)


class router_with:
    """A router's config and bias with another weight."""

    def __init__(self, router: TopKRouter, weight: Tensor) -> None:
        self.config, self.expert_bias, self.weight = router.config, router.expert_bias, weight


@kinds
def test_megatrons_router_is_another(fields, options):
    ours = router_of(fields, options)
    theirs = router_of(fields, {}, TopKRouter)
    assert not torch.allclose(theirs(tokens_of())[0], ours(tokens_of())[0], atol=1e-3)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("scores", ["sigmoid", "sqrtsoftplus", "pre_softmax", "softmax"])
@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "group_topk": 2}])
@pytest.mark.parametrize("topk", [1, 4])
def test_without_options_it_has_megatrons_bits(dense, scores, groups, topk):
    if groups and topk == 1:
        groups = {"num_groups": 4, "group_topk": 1}
    values = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    both = []
    for function in (topk_routing, topk_routing_with_score_function):
        x = values.clone().requires_grad_()
        probs, chosen = function(
            x,
            topk,
            use_pre_softmax=scores == "pre_softmax",
            scaling_factor=2.5,
            score_function="softmax" if "softmax" in scores else scores,
            expert_bias=None if "softmax" in scores else torch.linspace(0, 1, EXPERTS),
            dense_output=dense,
            **groups,
        )
        (probs * torch.linspace(1, 2, probs.shape[1])).sum().backward()
        both.append((probs, chosen, x.grad))
    assert all(map(torch.equal, *both))


MEGATRONS = {"moe_router_group_score_topk": 1, "moe_router_norm_topk_prob": True}


@pytest.mark.parametrize(
    "more",
    [
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0},
        {
            "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [1.0, 0.5],
        },
        {"moe_z_loss_coeff": 0.1},
        {"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "none"},
        {"moe_router_dtype": "fp64"},
    ],
    ids=["sequence", "two losses", "z-loss", "capacity", "fp64"],
)
def test_all_the_rest_is_megatrons(more, other=TopKRouter, padding=None, **config):
    """Options that say what Megatron does anyway: losses, dropping, counts of tokens, bits."""
    both = []
    for kind in (DeepSeekRouter, other):
        destroy_moe_metrics_tracker()
        router = router_of({**ROUTED, **more}, MEGATRONS, kind, **config)
        probs, chosen = router(tokens_of(), padding)
        probs.square().sum().backward()
        both.append((probs, chosen, router.weight.grad, router.local_tokens_per_expert))
    destroy_moe_metrics_tracker()
    assert all(map(torch.equal, *both))


def test_padding_is_that_of_packs():
    """As of PackedRouter, which corrects Megatron's."""
    padding = torch.arange(TOKENS)[:, None] >= TOKENS - 7
    losses = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0}
    config = {"calculate_per_token_loss": True}
    test_all_the_rest_is_megatrons(losses, PackedRouter, padding, **config)


def test_replay():
    """Choices that were recorded are taken again, with the weights of other tokens."""
    fields, options = KINDS["V3"]
    router = router_of(fields, options, moe_enable_routing_replay=True)
    try:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        _, first = router(tokens_of(0))
        RouterReplay.set_replay_data(RouterReplay.get_recorded_data())
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        probs, again = router(tokens_of(1))
    finally:
        RouterReplay.clear_global_router_replay_action()
        RouterReplay.clear_global_router_replay_instances()
    assert torch.equal(first, again) and not torch.equal(
        again, router_of(fields, options)(tokens_of(1))[1]
    )
    torch.testing.assert_close(probs.sum(-1), torch.full((TOKENS,), 2.5))


def moe_layers_of(model) -> list:
    return [layer.mlp for layer in model.decoder.layers if hasattr(layer.mlp, "router")]


def built(fields: dict, options: dict, *changes):
    """A model in evaluation mode; ``changes`` are made to its block spec."""
    config = config_for(TINY, torch.float32, **fields)
    spec = get_absorbed_mla_decoder_block_spec(
        config, backend="local", options=AbsorbedMLAOptions(**options)
    )
    for change in changes:
        spec = change(spec) or spec
    model = gpt_model(spec=spec, **fields).eval()
    torch.manual_seed(2)
    for layer in moe_layers_of(model):
        torch.nn.init.normal_(layer.router.weight, std=0.1)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(torch.linspace(0.3, -0.3, EXPERTS))
    return model


@kinds
def test_models(fields, options):
    """By the options of the layers; grouped experts choose alike, Megatron's router does not."""
    model, grouped = built(fields, options), built(fields, options, group_experts)
    assert {type(layer.router) for layer in moe_layers_of(model)} == {DeepSeekRouter}
    assert {type(layer.experts) for layer in moe_layers_of(grouped)} == {GroupedExperts}
    grouped.load_state_dict(model.state_dict())
    expected = logits(model)
    torch.testing.assert_close(logits(grouped), expected, rtol=1e-4, atol=1e-5)
    assert (logits(built(fields, {})) - expected).abs().max() > 1e-4, "a case that tells nothing"


def test_packs_with_padding_keep_the_router():
    fields, options = KINDS["V2"]
    model = built(fields, options, use_packed_router)
    assert {type(layer.router) for layer in moe_layers_of(model)} == {DeepSeekRouter}


@pytest.mark.parametrize("backend", ["local", "transformer_engine"])
def test_hybrid_stack(monkeypatch, backend):
    """Also Megatron's own MoE layer, which TransformerEngine's backend takes."""
    fields, options = KINDS["V2"]
    config = config_for(TINY, torch.float32, **fields)
    given = AbsorbedMLAOptions(**options)
    if backend == "transformer_engine":
        monkeypatch.setattr("specs.absorbed_mla_parts.HAVE_TE", True)
    spec = get_absorbed_mla_hybrid_stack_spec(config, backend=backend, options=given)
    [router] = [spec.submodules.moe_layer.submodules.mlp.keywords["submodules"].router]
    assert router.func is DeepSeekRouter and router.keywords == {"options": given}


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"moe_router_fusion": True}, MEGATRONS, "moe_router_fusion must be False"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, MEGATRONS, "must not be 'sinkhorn'"),
        (
            {"moe_router_load_balancing_type": "quantile_balancing"},
            MEGATRONS,
            "must not be 'quantile_balancing'",
        ),
        (
            {**SOFTMAX, "moe_router_pre_softmax": False},
            {"moe_router_norm_topk_prob": False},
            "needs moe_router_pre_softmax=True",
        ),
        (
            {"moe_router_num_groups": None, "moe_router_group_topk": None},
            {"moe_router_group_score_topk": 2},
            "needs moe_router_num_groups and moe_router_group_topk",
        ),
        ({}, {"moe_router_group_score_topk": 3}, "at most the 2 experts of a group"),
        (
            {"moe_router_topk": 5},
            {"moe_router_group_score_topk": 2},
            "moe_router_topk must be at most the 4 experts of moe_router_group_topk=2 groups",
        ),
    ],
)
@pytest.mark.parametrize("change", [[], [group_experts]], ids=["training", "grouped"])
def test_refused(fields, options, message, change):
    with pytest.raises(ValueError, match=message):
        built({**ROUTED, **fields}, options, *change)


def test_refused_without_experts():
    for spec in (
        get_absorbed_mla_decoder_block_spec,
        get_absorbed_mla_layer_spec,
        get_absorbed_mla_hybrid_stack_spec,
    ):
        for given in (MEGATRONS, {"post_mlp_layernorm": True}):
            with pytest.raises(ValueError, match=f"num_moe_experts is None.* given: {given}"):
                spec(config_for(TINY), backend="local", options=AbsorbedMLAOptions(**given))


def test_defaults_of_megatrons_arguments(monkeypatch):
    """Also of those that must be given by name, which a later release may have."""

    def routing(self, logits, padding_mask=None, *, more="its default"):
        return topk_routing_with_score_function(logits, 2), padding_mask, more

    monkeypatch.setattr(TopKRouter, "routing", routing)
    router = router_of(*KINDS["V2"])
    assert _ModelsChoice.routing(router, torch.zeros(3, EXPERTS))[1:] == (None, "its default")
