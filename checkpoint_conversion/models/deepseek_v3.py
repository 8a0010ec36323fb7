"""DeepSeek-V3: MoE router with sigmoid scores and a correction bias."""

from __future__ import annotations

from checkpoint_conversion.model_type import ModelType

ENTRY = ModelType(
    name="deepseek_v3",
    summary="sigmoid router with groups and correction bias",
    released=("DeepSeek-V3", "V3.1", "R1", "Moonlight"),
    architectures=("DeepseekV3ForCausalLM",),
    defaults={"norm_topk_prob": True, "routed_scaling_factor": 2.5},
    scoring_func="sigmoid",
    topk_methods=("noaux_tc",),
    from_arguments=True,
)
