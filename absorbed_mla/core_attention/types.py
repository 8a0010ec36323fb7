"""Inputs, outputs and gradients of attention, the same for both forms and every backend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# The rope part of whole queries and keys. Made once: an operator on a device for each empty part
# would cost the host as much as any other.
NO_ROPE = torch.empty(0)


class AttentionInputs(NamedTuple):
    """Query, key and value; a score is ``q_content . k_content + q_rope . k_rope``.

    The gradients of these tensors have the same type.

    Attributes:
        q_content: [S_q, B, N, D]: the absorbed query (D = C), or q_nope, or a whole query.
        q_rope: [S_q, B, N, R]; without elements, and of any shape, if q_content is a whole query.
        k_content: [S_k, B, H, D] with H = 1 (one latent head for all queries) or H = N.
        k_rope: [S_k, B, R], shared by all heads; likewise.
        value: [S_k, B, H, V], or None where the value is ``k_content`` itself.
    """

    q_content: Tensor
    q_rope: Tensor
    k_content: Tensor
    k_rope: Tensor
    value: Tensor | None

    @classmethod
    def multi_head(cls, q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        """Inputs of multi-head attention: q [S_q, B, N, D], k [S_k, B, N, D], v [S_k, B, N, V]."""
        return cls(q, NO_ROPE, k, NO_ROPE, v)

    def as_multi_head(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of multi-head attention; copies only if a rope part is separate."""
        assert self.value is not None, "the absorbed form has one key for all heads"
        if not self.q_rope.shape[-1]:
            return self.q_content, self.k_content, self.value
        repeated = self.k_rope.unsqueeze(2).expand(-1, -1, self.k_content.shape[2], -1)
        q = torch.cat((self.q_content, self.q_rope), dim=-1)
        return q, torch.cat((self.k_content, repeated), dim=-1), self.value

    def multi_head_gradient(self, dq: Tensor, dk: Tensor, dv: Tensor) -> AttentionInputs:
        """Gradient of these inputs, given the gradient of :meth:`as_multi_head`."""
        content = self.k_content.shape[-1]
        if dk.shape[-1] == content:
            return AttentionInputs.multi_head(dq, dk, dv)
        dk_rope = dk[..., content:].sum(2)
        return AttentionInputs(dq[..., :content], dq[..., content:], dk[..., :content], dk_rope, dv)


class AttentionOutput(NamedTuple):
    """Output of attention.

    Attributes:
        out: [S_q, B, N, V].
        lse: Log-sum-exp of the scores (natural logarithm), [S_q, B, N].
    """

    out: Tensor
    lse: Tensor


class OutputGradient(NamedTuple):
    """Gradient of :class:`AttentionOutput`; ``lse`` is None where the LSE was not used."""

    out: Tensor
    lse: Tensor | None
