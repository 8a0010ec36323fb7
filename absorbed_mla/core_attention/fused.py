"""Attention by a fused kernel for one dense piece at a time."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from absorbed_mla.core_attention.merge import merge
from absorbed_mla.core_attention.operands import Attended, AttendedGradient, Operands
from absorbed_mla.core_attention.pieces import pieces
from absorbed_mla.core_attention.reference import reference_backward
from absorbed_mla.core_attention.scores import ScoreRules


class DenseKernel(Protocol):
    """Attention of all queries to all keys, or causal with as many of both.

    Tensors are [S, B, N, D]; keys and values have as many heads as queries.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [S_q, B, N, V] and LSE [S_q, B, N]."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; ``out`` and ``lse`` may be over more keys than ``k``."""
        ...


class FusedBackend:
    """An attention backend made of a kernel for dense pieces, merged by their LSE in fp32.

    Args:
        name: Of the backend.
        kernel: For multi-head attention with separate values, without mask and dropout.
    """

    def __init__(self, name: str, kernel: DenseKernel) -> None:
        self.name = name
        self.kernel = kernel

    def forward(self, operands: Operands, rules: ScoreRules) -> Attended:
        """See ``reference_forward``; the value is needed."""
        q, k, v = _concatenate(operands)
        out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=torch.float32)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        for piece in pieces(rules.spans):
            queries, keys = piece.queries, piece.keys
            part = self.kernel.forward(q[queries], k[keys], v[keys], piece.causal, rules.scale)
            if not piece.first:
                part = merge(out[queries], lse[queries], *part)
            out[queries], lse[queries] = part
        return Attended(out, lse)

    def backward(
        self, grad: AttendedGradient, attended: Attended, operands: Operands, rules: ScoreRules
    ) -> Operands:
        """See ``reference_backward``, which does it where the LSE has a gradient."""
        if grad.lse is not None:
            return reference_backward(grad, attended, operands, rules)
        q, k, v = _concatenate(operands)
        grad_out, out, lse = grad.out.contiguous(), attended.out.contiguous(), attended.lse
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        for piece in pieces(rules.spans):
            queries, keys = piece.queries, piece.keys
            parts = self.kernel.backward(
                grad_out[queries],
                q[queries],
                k[keys],
                v[keys],
                out[queries],
                lse[queries],
                piece.causal,
                rules.scale,
            )
            for total, rows, part in zip((dq, dk, dv), (queries, keys, keys), parts):
                total[rows] += part
        content = operands.k_content.shape[-1]
        return Operands(
            dq[..., :content], dq[..., content:], dk[..., :content], dk[..., content:].sum(2), dv
        )


def _concatenate(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; query and key of one width each, k_rope repeated for every head."""
    q_content, q_rope, k_content, k_rope, value = operands
    assert value is not None, "the backend table refuses the latent form"
    repeated = k_rope.unsqueeze(2).expand(-1, -1, k_content.shape[2], -1)
    return torch.cat((q_content, q_rope), dim=-1), torch.cat((k_content, repeated), dim=-1), value
