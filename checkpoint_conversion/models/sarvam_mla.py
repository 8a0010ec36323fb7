"""Sarvam-105B: a DeepSeek-V3 whose released config.json has names of fields of its own."""

from __future__ import annotations

from dataclasses import replace

from checkpoint_conversion.models.deepseek_v3 import ENTRY as DEEPSEEK_V3

ENTRY = replace(
    DEEPSEEK_V3,
    name="sarvam_mla",
    summary="`deepseek_v3` by another name, and with fields of other names",
    released=("Sarvam-105B",),
    # Transformers' model is that of DeepSeek-V3.
    architectures=("DeepseekV3ForCausalLM", "SarvamMLAForCausalLM"),
    config_class="SarvamMLAConfig",
    aliases={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    defaults={
        **DEEPSEEK_V3.defaults,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "n_shared_experts": 1,
        "q_lora_rank": None,
        "topk_group": 1,
    },
    rope_types=("yarn", "default", "deepseek_yarn"),
    from_arguments=False,
)
