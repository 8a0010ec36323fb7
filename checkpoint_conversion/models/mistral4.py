"""Mistral 4: MoE router with softmax scores, and all experts of a layer stacked in one tensor."""

from __future__ import annotations

from checkpoint_conversion.model_type import FixedValue, ModelType

_GROUPS = FixedValue(1, "Megatron ranks Mistral 4's groups of experts otherwise")

ENTRY = ModelType(
    name="mistral4",
    summary=(
        "softmax router, experts of a layer in one tensor, queries that `llama_4_scaling_beta` "
        "scales"
    ),
    architectures=("Mistral4ForCausalLM",),
    defaults={"norm_topk_prob": True, "routed_scaling_factor": 1.0},
    only={
        "n_group": _GROUPS,
        "topk_group": _GROUPS,
        "quantization_config": FixedValue(None, "Mistral 4's FP8 is not that of DeepSeek"),
    },
    rope_types=("yarn",),
    scales_queries=True,
    rotary_part_of_head=True,
    scoring_func="softmax",
    topk_methods=("greedy",),
    stacks={
        "mlp.experts.gate_up_proj": "mlp.experts.{expert}.[gate|up]_proj.weight",
        "mlp.experts.down_proj": "mlp.experts.{expert}.down_proj.weight",
    },
    from_arguments=True,
)
