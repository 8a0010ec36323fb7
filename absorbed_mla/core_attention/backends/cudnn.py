"""cuDNN's fused attention, through PyTorch's operators that return and take the LSE."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.core_attention.backends.reference import reference_backward, reference_forward
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient


class CudnnKernel:
    """Dense multi-head attention in fp16 or bf16 on a GPU; a ``DenseKernel``."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See ``DenseKernel``."""
        if len(q) == len(k) == 1:
            return reference_forward(*_one_pair(q, k, v, scale))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *_heads_first(q, k, v), None, True, 0.0, causal, False, scale=scale
        )
        return out.permute(2, 0, 1, 3), lse.reshape(out.shape[:3]).permute(2, 0, 1)

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
        """See ``DenseKernel``."""
        if len(q) == len(k) == 1:
            grad, attended = OutputGradient(grad_out, None), AttentionOutput(out, lse)
            found = reference_backward(grad, attended, *_one_pair(q, k, v, scale))
            assert found.value is not None  # as the value is not the key
            return found.q_content, found.k_content, found.value
        # Without dropout the generator's state is not looked at.
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *_heads_first(grad_out, q, k, v, out),
            lse.permute(1, 2, 0).unsqueeze(-1).contiguous(),
            seed,
            seed,
            None,
            None,
            None,
            len(q),
            len(k),
            0.0,
            causal,
            scale=scale,
        )
        dq, dk, dv = (g.permute(2, 0, 1, 3) for g in grads)
        return dq, dk, dv


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[S, B, N, D] to [B, N, S, D], as views."""
    return tuple(x.permute(1, 2, 0, 3) for x in tensors)


def _one_pair(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[AttentionInputs, ScoreRules]:
    """What the reference takes for one query and one key, which cuDNN's backward refuses."""
    return AttentionInputs.multi_head(q, k, v), ScoreRules(scale, (Span(0, 1, 0, 1, None),))
