"""DeepSeek-V4: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="deepseek_v4",
    lacking="compressed attention, which is no MLA, and hyper-connections",
    also=("deepseek_v41",),
    released=("DeepSeek-V4",),
)
