"""Kimi Linear and Kimi-K3: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="kimi_linear",
    lacking="KDA in most layers; in Kimi-K3, attention residuals and SiTU",
    unmapped="unrotated rope channels, in Kimi-K3 output gates and latent experts",
    also=("kimi_k3",),
    released=("Kimi-Linear", "Kimi-K3"),
)
