"""GLM-5.3-Flash: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="glm5_next",
    lacking="KDA in most layers, hyper-connections, index scores of pooled keys",
    unmapped="latent attention without rotary channels, clamped SwiGLU",
    also=("glm5_next_text",),
    released=("GLM-5.3-Flash",),
)
