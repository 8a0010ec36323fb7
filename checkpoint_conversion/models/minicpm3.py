"""MiniCPM3: dense, with LongRoPE in halves, and scaled embeddings, residual branches and logits."""

from __future__ import annotations

from dataclasses import replace

from checkpoint_conversion.models.deepseek_v3 import ENTRY as DEEPSEEK_V3

ENTRY = replace(
    DEEPSEEK_V3,
    name="minicpm3",
    summary="dense, with `use_mup` and LongRoPE",
    released=("MiniCPM3-4B",),
    architectures=("MiniCPM3ForCausalLM",),
    defaults={
        "tie_word_embeddings": True,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "v_head_dim": None,
    },
    rope_types=("longrope", "default"),
    rope_interleave=False,
    mup=True,
    experts=False,
    from_arguments=False,
)
