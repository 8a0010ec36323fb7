"""Kimi Linear: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="kimi_linear",
    has="linear attention in most of its layers",
    released=("Kimi-Linear",),
)
