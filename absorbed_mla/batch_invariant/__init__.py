"""Parity mode: a token gets bitwise the same logits in training, prefill and decode, in any batch.

See ``docs/parity.md``.
"""

from absorbed_mla.batch_invariant.mode import (
    batch_invariant_mode,
    disable_batch_invariant_mode,
    enable_batch_invariant_mode,
    is_enabled,
)

__all__ = [
    "batch_invariant_mode",
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "is_enabled",
]
