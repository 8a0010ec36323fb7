"""openPangu Ultra MoE: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="pangu_ultra_moe",
    lacking="norms on both sides of sublayers",
    released=("openPangu-Ultra-MoE",),
)
