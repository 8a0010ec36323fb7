"""GLM-4.7-Flash: a DeepSeek-V3 whose config.json may list the kind of every layer."""

from __future__ import annotations

from checkpoint_conversion.model_type import ModelType

ENTRY = ModelType(
    name="glm4_moe_lite",
    summary="`deepseek_v3` whose config.json may list the kind of every layer",
    released=("GLM-4.7-Flash",),
    architectures=("Glm4MoeLiteForCausalLM",),
    defaults={
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
    lists_layers=True,
    scoring_func="sigmoid",
    topk_methods=("noaux_tc",),
)
