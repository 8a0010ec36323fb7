"""Mistral Large 4: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="mistral_large4",
    lacking="latents that later layers reuse, learned frequencies and query scales, soft caps",
    unmapped="layers without RoPE",
    also=("mistral_large4_text",),
    released=("Mistral-Large-4",),
)
