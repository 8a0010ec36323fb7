"""Ling 2.5 to 3 and Ring: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="bailing_hybrid",
    lacking="linear attention in most layers (KDA, Lightning)",
    unmapped="output gates",
    released=("Ling-2.5", "2.6", "3.0", "Ring"),
)
