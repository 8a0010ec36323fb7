"""What attention is computed from, and what it gives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Operands(NamedTuple):
    """Operands of attention whose scores are ``q_content . k_content + q_rope . k_rope``.

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


class Attended(NamedTuple):
    """What attention gives.

    Attributes:
        out: [S_q, B, N, V].
        lse: Log-sum-exp of the scores, [S_q, B, N].
    """

    out: Tensor
    lse: Tensor


class AttendedGradient(NamedTuple):
    """The gradient of :class:`Attended`; None where the LSE was not used."""

    out: Tensor
    lse: Tensor | None
