"""A.X-K1: a DeepSeek-V3 with a norm of its experts' output."""

from __future__ import annotations

from dataclasses import replace

from checkpoint_conversion.models.deepseek_v3 import ENTRY as DEEPSEEK_V3

ENTRY = replace(
    DEEPSEEK_V3,
    name="axk1",
    # What the release called itself before transformers had it.
    also=("AXK1",),
    summary="`deepseek_v3` with a norm of the experts' output",
    released=("A.X-K1",),
    architectures=("AXK1ForCausalLM",),
    defaults={**DEEPSEEK_V3.defaults, "first_k_dense_replace": 1},
    lists_layers=True,
    post_mlp_layernorm=True,
    # The release has none, which transformers takes for zeros.
    may_be_missing=("mlp.gate.e_score_correction_bias",),
)
