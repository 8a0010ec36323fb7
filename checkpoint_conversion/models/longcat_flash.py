"""LongCat-Flash: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="longcat_flash",
    lacking="two attentions in a layer, experts that do nothing (zero_expert_num)",
    unmapped="latents that are scaled (mla_scale_q_lora, mla_scale_kv_lora)",
    released=("LongCat-Flash",),
)
