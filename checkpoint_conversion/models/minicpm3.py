"""MiniCPM3: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="minicpm3",
    lacking="a factor for each rotary frequency (longrope)",
    unmapped=(
        "scaled embeddings, residuals and logits (scale_emb, scale_depth, dim_model_base), "
        "which are no powers of two and would round bf16 weights, and RoPE in halves"
    ),
    released=("MiniCPM3-4B",),
)
