"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, an indexer in every layer."""

from __future__ import annotations

from dataclasses import replace

from checkpoint_conversion.model_type import SparseAttention
from checkpoint_conversion.models.deepseek_v3 import ENTRY as DEEPSEEK_V3

ENTRY = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    summary="`deepseek_v3` with sparse attention, an indexer in every layer",
    released=("DeepSeek-V3.2", "V3.2-Exp"),
    architectures=("DeepseekV32ForCausalLM",),
    lists_layers=True,
    sparse=SparseAttention(interleaved=False),
)
