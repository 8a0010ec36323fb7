"""Backward of attention over the latent on Hopper GPUs: the launch of its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.kernels.hopper.backward_delta import delta
from absorbed_mla.kernels.hopper.backward_fragments import in_order
from absorbed_mla.kernels.hopper.backward_kernel import attend_backward
from absorbed_mla.kernels.hopper.tensor_map import tensor_map
from absorbed_mla.kernels.hopper.tile import KEYS, tile_shape
from absorbed_mla.kernels.launch import launch

_KEYS = KEYS.value


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    tiles: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what ``forward`` took; programs add to those of keys in any order.

    Args:
        grad_out: [S_q, B, N, C].
        grad_lse: [S_q, B, N], or None where the LSE was not used.
        out: [S_q, B, N, C], possibly over more keys than these.
        lse: fp32 [S_q, B, N], over the same keys as ``out``.
        q_content: bf16 or fp16 [S_q, B, N, C].
        q_rope: [S_q, B, N, R].
        latent: [S_k, B, C].
        k_rope: [S_k, B, R].
        tiles: As ``forward`` took them.
        scale: Multiplies the scores.

    Returns:
        Gradients of q_content and q_rope in their dtype, and of [latent | k_rope] in fp32,
        [S_k, B, C + R]; the latent's is that of the key and of the value.
    """
    keys, batch, kv_lora_rank = latent.shape
    heads, rope = q_rope.shape[2:]
    columns = kv_lora_rank + rope
    tokens, packed = tile_shape(heads)
    dq_content, dq_rope = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_content, q_rope)
    )
    blocks = -(-keys // _KEYS)
    # The kernel adds to it.
    dkv = latent.new_zeros((batch, blocks, _KEYS * columns), dtype=torch.float32)
    programs = len(tiles) * batch * (heads // packed)
    if not programs or not keys:
        return dq_content.zero_(), dq_rope.zero_(), in_order(dkv, columns, keys)
    grad_out = grad_out.to(q_content.dtype)
    launch(
        attend_backward,
        (programs,),
        tensor_map(q_content, (tokens, 1, packed, kv_lora_rank)),
        tensor_map(q_rope, (tokens, 1, packed, rope)),
        tensor_map(grad_out, (tokens, 1, packed, kv_lora_rank)),
        tensor_map(latent, (_KEYS, 1, kv_lora_rank)),
        tensor_map(k_rope, (_KEYS, 1, rope)),
        lse.contiguous(),
        delta(grad_out, grad_lse, out),
        tiles,
        dq_content,
        dq_rope,
        dkv,
        batch,
        heads,
        blocks,
        scale,
        C=kv_lora_rank,
        R=rope,
        HEADS=packed,
        num_warps=8,
    )
    return dq_content, dq_rope, in_order(dkv, columns, keys)
