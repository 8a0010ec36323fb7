"""A.X-K2: refused."""

from __future__ import annotations

from checkpoint_conversion.model_type import Refused

ENTRY = Refused(
    name="axk2",
    lacking="norms with gates of low rank",
    unmapped="queries and output gates of one projection (q_gate_proj)",
    released=("A.X-K2",),
)
