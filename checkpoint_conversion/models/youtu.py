"""Youtu-LLM: a dense DeepSeek-V3 with tied embeddings."""

from __future__ import annotations

from dataclasses import replace

from checkpoint_conversion.models.deepseek_v3 import ENTRY as DEEPSEEK_V3

ENTRY = replace(
    DEEPSEEK_V3,
    name="youtu",
    summary="a dense `deepseek_v3`, with tied embeddings",
    released=("Youtu-LLM-2B",),
    architectures=("YoutuForCausalLM",),
    defaults={"tie_word_embeddings": True},
    experts=False,
    from_arguments=False,
)
