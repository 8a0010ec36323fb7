"""Hy4: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="hy_v4",
    lacking="hyper-connections, indexers that rotate the last channels",
    unmapped="output gates, sinks and clamped SwiGLU",
    also=("hy_v4_vl", "hy_v4_vl_text"),
    released=("Hy4-preview",),
)
