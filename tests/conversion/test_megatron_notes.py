"""Notes say where Megatron would compute something else with the same weights, and only there."""

from __future__ import annotations

import pytest
import torch

from checkpoint_conversion.megatron_args import megatron_notes, routing_notes, to_megatron_args
from checkpoint_conversion.model import ModelConfig
from tests.conversion.released import DEEPSEEK_V2_LITE, DEEPSEEK_V3, MOONLIGHT, RELEASED
from tests.conversion.support import V2_LITE, tiny_config

_EXPERTS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
_V2 = {**V2_LITE, **_EXPERTS, "topk_method": "group_limited_greedy"}
_ROUTING = [
    (_EXPERTS, []),
    ({**_EXPERTS, "n_group": 1, "topk_group": 1}, []),
    ({**_EXPERTS, "n_group": 2}, []),
    (
        {**_EXPERTS, "num_experts_per_tok": 2},
        ["best 2 of each group's experts; Megatron by the best 1"],
    ),
    ({**_EXPERTS, "num_experts_per_tok": 6}, ["Megatron by the best 3"]),
    ({**_EXPERTS, "norm_topk_prob": False}, ["the model does not normalise"]),
    ({**_EXPERTS, "num_experts_per_tok": 1, "n_group": 2}, ["the model does normalise"]),
    ({**V2_LITE, "n_routed_experts": 16}, []),
    (_V2, ["chooses 2 groups by the best 1 of each group's experts; Megatron by the best 2"]),
    ({**_V2, "num_experts_per_tok": 2}, []),
    ({**_V2, "n_group": 2, "norm_topk_prob": True}, ["transformers ignores the field"]),
]


@pytest.mark.parametrize(("changes", "messages"), _ROUTING)
def test_routing_differs_where_the_notes_say_so(changes, messages):
    config = tiny_config(**changes)
    notes = routing_notes(config)
    assert len(notes) == len(messages)
    assert all(message in note for message, note in zip(messages, notes))
    ours, theirs = _route_by_transformers_and_megatron(config)
    assert torch.allclose(ours, theirs, atol=1e-6) == (not notes)


def _route_by_transformers_and_megatron(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight of every expert for every token."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    loaded = auto.CONFIG_MAPPING[config.model_type].from_dict(config.hugging_face)
    v2 = config.model_type == "deepseek_v2"
    router = (DeepseekV2TopkRouter if v2 else DeepseekV3TopkRouter)(loaded)
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight)
    bias = None
    if not v2:
        bias = router.e_score_correction_bias.normal_(std=0.1)
    with torch.no_grad():
        logits, weights, chosen = router(torch.randn(200, config.hidden_size))
    args = to_megatron_args(config)
    probabilities, _ = topk_routing_with_score_function(
        logits,
        args.moe_router_topk,
        use_pre_softmax=args.moe_router_pre_softmax,
        num_groups=args.moe_router_num_groups,
        group_topk=args.moe_router_group_topk,
        scaling_factor=args.moe_router_topk_scaling_factor,
        score_function=args.moe_router_score_function,
        expert_bias=bias,
    )
    return torch.zeros_like(logits).scatter(1, chosen, weights), probabilities


def test_released_models_route_the_same():
    for name in RELEASED:
        assert routing_notes(ModelConfig.from_hugging_face(RELEASED[name])) == []
    assert megatron_notes(ModelConfig.from_hugging_face(DEEPSEEK_V3)) == []
    assert megatron_notes(ModelConfig.from_hugging_face(DEEPSEEK_V2_LITE)) == []
    (note,) = megatron_notes(ModelConfig.from_hugging_face(MOONLIGHT))
    assert note.startswith("rms_norm_eps is 1e-05: Hugging Face's norms inside the attention have")
