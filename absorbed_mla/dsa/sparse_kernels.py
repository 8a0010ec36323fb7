"""Attention over chosen keys by kernels: the base class of their backends."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionRequest
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from absorbed_mla.dsa.backend import SparseRequest
from absorbed_mla.dsa.cached_keys import CachedRows
from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.inference.rows import Rows
from absorbed_mla.kernels import operators


class SparseKernels:
    """Calls the sparse kernels that ``kernels/operators.py`` knows by these names."""

    forward_kernel: str
    backward_kernel: str

    def forward(self, inputs: AttentionInputs, chosen: Tensor, scale: float) -> AttentionOutput:
        """As ``sparse_reference.sparse_forward``; the output has the dtype of the query.

        The keys of a query may be in any order.
        """
        q_content, q_rope, k_content, k_rope, _ = inputs
        return AttentionOutput(
            *operators.sparse_attention_forward(
                q_content, q_rope, k_content.squeeze(2), k_rope, chosen, scale, self.forward_kernel
            )
        )

    def forward_cached(
        self,
        q_content: Tensor,
        q_rope: Tensor,
        cache: Tensor,
        rows: Rows,
        chosen: Tensor,
        scale: float,
    ) -> AttentionOutput:
        """As ``cached_attention.attend_cached``; the output has the dtype of the query."""
        cached, width = CachedRows(cache), q_content.shape[-1]
        scales = None
        if cache.dtype == torch.uint8:
            latents = Fp8Latents(width, q_rope.shape[-1])
            latent, scales, k_rope = latents.parts(cached.rows)
        else:
            latent, k_rope = cached.rows[..., :width], cached.rows[..., width:]
        return AttentionOutput(
            *operators.sparse_attention_cached(
                q_content,
                q_rope,
                latent,
                scales,
                k_rope,
                chosen,
                rows.query_starts,
                rows.query_lengths,
                rows.block_table,
                cached.block_size,
                cached.of_block,
                cached.of_position,
                scale,
                self.forward_kernel,
            )
        )

    def backward(
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
        dq_content, dq_rope, dkv = operators.sparse_attention_backward(
            *grad,
            *output,
            q_content,
            q_rope,
            k_content.squeeze(2),
            k_rope,
            chosen,
            scale,
            torch.are_deterministic_algorithms_enabled(),
            self.backward_kernel,
        )
        width = q_content.shape[-1]
        return AttentionInputs(dq_content, dq_rope, dkv[..., None, :width], dkv[..., width:], None)


class InvariantSparse(SparseKernels):
    """For parity mode: see ``kernels/dsa/forward.py``."""

    forward_kernel = "invariant"
    backward_kernel = "triton"
    # The dense kernels have other tiles.
    equals_dense = False

    def why_not(self, request: SparseRequest) -> None:
        """Nothing more is refused."""


def dense_request(request: SparseRequest) -> AttentionRequest:
    """The request to the dense kernels, whose limits of devices, dtypes and widths these share."""
    return AttentionRequest(
        form="absorbed",
        device=request.device,
        dtype=request.dtype,
        key_width=request.kv_lora_rank + request.rope_dim,
        value_width=request.kv_lora_rank,
        masked=False,
        dropout=False,
    )
