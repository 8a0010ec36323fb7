"""An attention backend as one differentiable function, to be tested by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionBackend, ReferenceBackend
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient


def attention(
    q_content: Tensor,
    q_rope: Tensor,
    k_content: Tensor,
    k_rope: Tensor,
    value: Tensor | None,
    rules: ScoreRules,
    backend: AttentionBackend | None = None,
) -> tuple[Tensor, Tensor]:
    """Output in the dtype of ``q_content``, and LSE. Shapes: see ``AttentionInputs``."""
    operands = (q_content, q_rope, k_content, k_rope, value)
    return _Attention.apply(backend or ReferenceBackend(), rules, *operands)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, rules, *operands):
        out, lse = backend.forward(AttentionInputs(*operands), rules)
        out = out.to(operands[0].dtype)
        ctx.call = (backend, rules)
        # Backends have a way of their own where nobody used the LSE.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *operands)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        out, lse, *operands = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        backend, rules = ctx.call
        grads = backend.backward(
            OutputGradient(grad_out, grad_lse),
            AttentionOutput(out, lse),
            AttentionInputs(*operands),
            rules,
        )
        return None, None, *(None if x is None else g.to(x.dtype) for x, g in zip(operands, grads))
