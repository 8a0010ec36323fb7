"""Kimi Linear: not converted; see the summary."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="kimi_linear",
    summary="linear attention in most of its layers",
    released=("Kimi-Linear",),
)
