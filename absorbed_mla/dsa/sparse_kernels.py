"""Attention over chosen keys by kernels, called like the functions of ``sparse_reference``."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient


class SparseKernels:
    """A forward and a backward kernel, imported with their first call.

    Args:
        forward: Full name of the function.
        backward: Likewise.
    """

    def __init__(self, forward: str, backward: str) -> None:
        self._forward, self._backward = forward, backward

    def sparse_forward(
        self, inputs: AttentionInputs, chosen: Tensor, scale: float
    ) -> AttentionOutput:
        """As ``sparse_reference.sparse_forward``; the output has the dtype of the query."""
        q_content, q_rope, k_content, k_rope, _ = inputs
        kernel = _imported(self._forward)
        with torch.cuda.device_of(q_content):
            return AttentionOutput(
                *kernel(q_content, q_rope, k_content.squeeze(2), k_rope, chosen, scale)
            )

    def sparse_backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        chosen: Tensor,
        scale: float,
    ) -> AttentionInputs:
        """As ``sparse_reference.sparse_backward``; gradients of queries have their dtype.

        With ``torch.use_deterministic_algorithms(True)`` keys are added up in a fixed order.
        """
        q_content, q_rope, k_content, k_rope, _ = inputs
        kernel = _imported(self._backward)
        with torch.cuda.device_of(q_content):
            dq_content, dq_rope, dkv = kernel(
                *grad,
                *output,
                q_content,
                q_rope,
                k_content.squeeze(2),
                k_rope,
                chosen,
                scale,
                torch.are_deterministic_algorithms_enabled(),
            )
        width = q_content.shape[-1]
        return AttentionInputs(dq_content, dq_rope, dkv[..., None, :width], dkv[..., width:], None)


def _imported(name: str) -> Callable:
    module, _, function = name.rpartition(".")
    found: Callable = getattr(importlib.import_module(module), function)
    return found


KERNELS = {
    "triton": SparseKernels(
        "absorbed_mla.kernels.dsa.forward.forward", "absorbed_mla.kernels.dsa.backward.backward"
    ),
    "hopper": SparseKernels(
        "absorbed_mla.kernels.hopper.sparse_forward.sparse_forward",
        "absorbed_mla.kernels.hopper.sparse_backward.sparse_backward",
    ),
}
