"""DeepSeek-V4: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="deepseek_v4",
    lacking=(
        "compressed attention (no multi-latent attention), hyper-connections and hashed experts"
    ),
    also=("deepseek_v41",),
    released=("DeepSeek-V4",),
)
