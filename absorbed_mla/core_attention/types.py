"""What attention is computed from, and what it gives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionInputs(NamedTuple):
    """AttentionInputs of attention whose scores are ``q_content . k_content + q_rope . k_rope``.

    Their gradients come as the same.

    Attributes:
        q_content: [S_q, B, N, D]; the absorbed query (D = C) or q_nope.
        q_rope: [S_q, B, N, rope]; rope may be 0.
        k_content: [S_k, B, K, D] with K = 1 (one latent head for all queries) or K = N.
        k_rope: [S_k, B, rope], shared by all heads.
        value: [S_k, B, K, V], or None where the value is ``k_content`` itself.
    """

    q_content: Tensor
    q_rope: Tensor
    k_content: Tensor
    k_rope: Tensor
    value: Tensor | None

    @classmethod
    def multi_head(cls, q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        """Ordinary attention: q [S_q, B, N, D], k [S_k, B, N, D], v [S_k, B, N, V]."""
        return cls(q, q[..., :0], k, k[:, :, 0, :0], v)

    def as_multi_head(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of ordinary attention, copied only where a rope part is apart."""
        assert self.value is not None, "the latent form has one key for all heads"
        if not self.q_rope.shape[-1]:
            return self.q_content, self.k_content, self.value
        repeated = self.k_rope.unsqueeze(2).expand(-1, -1, self.k_content.shape[2], -1)
        q = torch.cat((self.q_content, self.q_rope), dim=-1)
        return q, torch.cat((self.k_content, repeated), dim=-1), self.value

    def multi_head_gradient(self, dq: Tensor, dk: Tensor, dv: Tensor) -> AttentionInputs:
        """The gradient of these operands from that of :meth:`as_multi_head`."""
        content = self.k_content.shape[-1]
        dk_rope = dk[..., content:]
        dk_rope = dk_rope.sum(2) if dk_rope.shape[-1] else dk_rope[:, :, 0]
        return AttentionInputs(dq[..., :content], dq[..., content:], dk[..., :content], dk_rope, dv)


class AttentionOutput(NamedTuple):
    """What attention gives.

    Attributes:
        out: [S_q, B, N, V].
        lse: Log-sum-exp of the scores, [S_q, B, N].
    """

    out: Tensor
    lse: Tensor


class OutputGradient(NamedTuple):
    """The gradient of :class:`AttentionOutput`; None where the LSE was not used."""

    out: Tensor
    lse: Tensor | None
