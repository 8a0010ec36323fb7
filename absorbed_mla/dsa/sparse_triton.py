"""Attention over chosen keys by the ``triton`` kernels, called like the reference's functions."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient


def sparse_forward(inputs: AttentionInputs, chosen: Tensor, scale: float) -> AttentionOutput:
    """As ``sparse_reference.sparse_forward``; the output has the dtype of the query."""
    from absorbed_mla.kernels.dsa.forward import forward

    q_content, q_rope, k_content, k_rope, _ = inputs
    with torch.cuda.device_of(q_content):
        return AttentionOutput(
            *forward(q_content, q_rope, k_content.squeeze(2), k_rope, chosen, scale)
        )


def sparse_backward(
    grad: OutputGradient,
    output: AttentionOutput,
    inputs: AttentionInputs,
    chosen: Tensor,
    scale: float,
) -> AttentionInputs:
    """As ``sparse_reference.sparse_backward``; gradients of queries have their dtype.

    With ``torch.use_deterministic_algorithms(True)`` keys are added up in a fixed order.
    """
    from absorbed_mla.kernels.dsa.backward import backward

    q_content, q_rope, k_content, k_rope, _ = inputs
    deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.cuda.device_of(q_content):
        dq_content, dq_rope, dkv = backward(
            *grad,
            *output,
            q_content,
            q_rope,
            k_content.squeeze(2),
            k_rope,
            chosen,
            scale,
            deterministic,
        )
    width = q_content.shape[-1]
    return AttentionInputs(dq_content, dq_rope, dkv[..., None, :width], dkv[..., width:], None)
