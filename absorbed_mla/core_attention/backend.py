"""Which implementation computes the attention, and why another one cannot."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from absorbed_mla.core_attention.reference import reference_backward, reference_forward
from absorbed_mla.core_attention.scores import ScoreRules


class AttentionBackend(Protocol):
    """Computes attention, without autograd.

    The contract of its two functions is that of :func:`reference_forward` and
    :func:`reference_backward`. Results may be in a lower precision than the reference's.
    """

    name: str

    def forward(
        self,
        q_content: Tensor,
        q_rope: Tensor,
        k_content: Tensor,
        k_rope: Tensor,
        value: Tensor | None,
        rules: ScoreRules,
    ) -> tuple[Tensor, Tensor]:
        """Output [S_q, B, N, V] and LSE [S_q, B, N]."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor,
        out: Tensor,
        lse: Tensor,
        q_content: Tensor,
        q_rope: Tensor,
        k_content: Tensor,
        k_rope: Tensor,
        value: Tensor | None,
        rules: ScoreRules,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q_content, q_rope, k_content, k_rope and value."""
        ...


class ReferenceBackend:
    """Plain PyTorch, any device, dtype, mask and layout."""

    name = "reference"
    forward = staticmethod(reference_forward)
    backward = staticmethod(reference_backward)


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
