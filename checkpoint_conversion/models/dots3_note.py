"""dots3: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="dots3_note",
    lacking="two kinds of MLA by layer",
    unmapped="scaled latents, output gates, windows and a norm of k_rope",
    also=("dots3_note_text",),
    released=("dots3-note",),
)
