"""A.X-K1: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="axk1",
    lacking="a norm of the output of mixtures of experts (post_mlp_layernorm)",
    released=("A.X-K1",),
)
