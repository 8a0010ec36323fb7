"""GigaChat 3.5: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="gigachat3_5",
    lacking="gated norms, on both sides of sublayers",
    unmapped="gated delta net in most layers, output gates and scaled latents",
    released=("GigaChat-3.5",),
)
