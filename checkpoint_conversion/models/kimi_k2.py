"""Kimi-K2: a DeepSeek-V3 by another name."""

from __future__ import annotations

from dataclasses import replace

from checkpoint_conversion.models.deepseek_v3 import ENTRY as DEEPSEEK_V3

ENTRY = replace(
    DEEPSEEK_V3,
    name="kimi_k2",
    summary="`deepseek_v3` by another name; from Megatron's arguments alone it becomes that",
    released=("Kimi-K2", "K2-Thinking"),
    architectures=("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    from_arguments=False,
)
