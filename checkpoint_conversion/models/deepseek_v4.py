"""DeepSeek-V4: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="deepseek_v4",
    has="compressed attention (deepseek_v4), which is no multi-latent attention",
    released=("DeepSeek-V4",),
)
