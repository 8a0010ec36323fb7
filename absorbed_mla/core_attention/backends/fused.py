"""Attention by a fused kernel for one dense piece at a time."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from absorbed_mla.core_attention.backends.reference import reference_backward
from absorbed_mla.core_attention.masks.pieces import Piece, cut_into_pieces
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.merge import merge
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient


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

    def forward(self, operands: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``reference_forward``; several pieces are summed in fp32."""
        q, k, v = operands.as_multi_head()
        cut = cut_into_pieces(rules.spans)
        if len(cut) == 1 and cut[0].queries == slice(0, len(q)):
            keys, causal = cut[0].keys, cut[0].causal
            return AttentionOutput(*self.kernel.forward(q, k[keys], v[keys], causal, rules.scale))
        out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=torch.float32)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        for piece in cut:
            queries, keys = piece.queries, piece.keys
            part = self.kernel.forward(q[queries], k[keys], v[keys], piece.causal, rules.scale)
            if not piece.first:
                part = merge(out[queries], lse[queries], *part)
            out[queries], lse[queries] = part
        return AttentionOutput(out, lse)

    def backward(
        self,
        grad: OutputGradient,
        attended: AttentionOutput,
        operands: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``reference_backward``, which does it where the LSE has a gradient."""
        if grad.lse is not None:
            return reference_backward(grad, attended, operands, rules)
        q, k, v = operands.as_multi_head()
        cut = cut_into_pieces(rules.spans)
        whole = (slice(0, len(q)), slice(0, len(k)))
        if len(cut) == 1 and (cut[0].queries, cut[0].keys) == whole:
            found = self._piece_gradient(cut[0], grad.out, attended, (q, k, v), rules.scale)
            return operands.multi_head_gradient(*found)
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        for piece in cut:
            found = self._piece_gradient(piece, grad.out, attended, (q, k, v), rules.scale)
            for total, rows, part in zip(sums, (piece.queries, piece.keys, piece.keys), found):
                total[rows] += part
        return operands.multi_head_gradient(*sums)

    def _piece_gradient(
        self,
        piece: Piece,
        grad_out: Tensor,
        attended: AttentionOutput,
        operands: tuple[Tensor, Tensor, Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = operands
        queries, keys = piece.queries, piece.keys
        rows = (grad_out[queries].contiguous(), q[queries], k[keys], v[keys])
        out = attended.out[queries].contiguous()
        return self.kernel.backward(*rows, out, attended.lse[queries], piece.causal, scale)
