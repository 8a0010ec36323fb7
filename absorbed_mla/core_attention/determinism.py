"""Whether results must repeat to the bit."""

from __future__ import annotations

import torch


def is_demanded() -> bool:
    """Whether ``torch.use_deterministic_algorithms`` is on, not only to warn."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
