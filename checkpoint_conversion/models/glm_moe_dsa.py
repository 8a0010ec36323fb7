"""GLM-5: DeepSeek-V3.2 with rotated pairs in the indexer, and layers that share selections."""

from __future__ import annotations

from dataclasses import replace

from checkpoint_conversion.model_type import SparseAttention
from checkpoint_conversion.models.deepseek_v32 import ENTRY as DEEPSEEK_V32

ENTRY = replace(
    DEEPSEEK_V32,
    name="glm_moe_dsa",
    summary="`deepseek_v3` with sparse attention, whose selections layers may share (GLM-5.2)",
    released=("GLM-5", "5.1", "5.2"),
    architectures=("GlmMoeDsaForCausalLM",),
    sparse=SparseAttention(interleaved=True, shared=True),
)
