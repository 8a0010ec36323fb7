"""A.X-K1: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="axk1",
    lacking="norms of the experts' output (post_mlp_layernorm)",
    released=("A.X-K1",),
)
