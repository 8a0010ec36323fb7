"""The arguments of the backward of attention over the latent, alike for all its launchers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LatentBackward(NamedTuple):
    """What the forward took and gave, and the gradients of its output.

    Launchers return gradients of q_content and q_rope in their dtype, and of [latent | k_rope] in
    fp32, [S_k, B, C + R]; the latent's is that of the key and of the value.

    Attributes:
        grad_out: [S_q, B, N, C].
        grad_lse: [S_q, B, N], or None where the LSE was not used.
        out: [S_q, B, N, C], possibly over more keys than these.
        lse: fp32 [S_q, B, N], over the same keys as ``out``.
        q_content: [S_q, B, N, C]; for Hopper in bf16 or fp16.
        q_rope: [S_q, B, N, R].
        latent: [S_k, B, C].
        k_rope: [S_k, B, R].
        scale: Multiplies the scores.
    """

    grad_out: Tensor
    grad_lse: Tensor | None
    out: Tensor
    lse: Tensor
    q_content: Tensor
    q_rope: Tensor
    latent: Tensor
    k_rope: Tensor
    scale: float

    def cast(self) -> LatentBackward:
        """With ``grad_out`` in the dtype of the query."""
        return self._replace(grad_out=self.grad_out.to(self.q_content.dtype))

    def empty_query_gradients(self) -> tuple[Tensor, Tensor]:
        """Where the gradients of q_content and q_rope go, contiguous."""
        content, rope = (
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in (self.q_content, self.q_rope)
        )
        return content, rope

    def zero_key_gradients(self) -> Tensor:
        """Zeros, to which the gradients of [latent | k_rope] are added."""
        width = self.latent.shape[-1] + self.k_rope.shape[-1]
        return self.latent.new_zeros((*self.latent.shape[:2], width), dtype=torch.float32)
