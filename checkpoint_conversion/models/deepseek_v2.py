"""DeepSeek-V2: MoE router with softmax scores."""

from __future__ import annotations

from checkpoint_conversion.model_type import ModelType

ENTRY = ModelType(
    name="deepseek_v2",
    summary="softmax router, with and without groups",
    released=("DeepSeek-V2", "V2-Lite"),
    architectures=("DeepseekV2ForCausalLM",),
    defaults={"routed_scaling_factor": 1.0},
    ignores_norm_topk_prob=(
        "transformers ignores the field in DeepSeek-V2, and so does this package; DeepSeek's own "
        "code divides the scores of a token's experts by their sum"
    ),
    scoring_func="softmax",
    topk_methods=("greedy", "group_limited_greedy"),
    from_arguments=True,
)
