"""Ling 2.5 to 3 and Ring: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="bailing_hybrid",
    lacking="linear attention (KDA in Ling 3, Lightning before) in most layers",
    unmapped="output gates",
    released=("Ling-2.5", "2.6", "3.0", "Ring"),
)
