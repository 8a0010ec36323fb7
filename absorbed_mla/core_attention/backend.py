"""Which implementation computes the attention, and why another one cannot."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from absorbed_mla.core_attention.reference import reference_attention
from absorbed_mla.core_attention.scores import ScoreRules


class AttentionBackend(Protocol):
    """Computes attention; the contract is :func:`reference_attention`'s."""

    name: str

    def attention(
        self,
        q_content: Tensor,
        q_rope: Tensor,
        k_content: Tensor,
        k_rope: Tensor,
        value: Tensor | None,
        rules: ScoreRules,
    ) -> tuple[Tensor, Tensor]:
        """Output [S, B, N, V] and LSE [S, B, N]."""
        ...


class ReferenceBackend:
    """Plain PyTorch, any device, dtype, mask and layout."""

    name = "reference"
    attention = staticmethod(reference_attention)


_BACKENDS: dict[str, AttentionBackend] = {"reference": ReferenceBackend()}


def select_backend(name: str) -> AttentionBackend:
    """The backend called ``name``; ``"auto"`` takes the fastest that can run.

    Raises:
        ValueError: If there is no backend of that name.
    """
    if name == "auto":
        name = "reference"
    if name not in _BACKENDS:
        raise ValueError(
            f"core_attention_backend must be one of auto, {', '.join(_BACKENDS)}; got {name!r}"
        )
    return _BACKENDS[name]
