"""Backward of attention over the latent on Hopper GPUs with the same bits in every run.

Some tokens at a time: a kernel computes dQ and stores P and dS in the dtype of the query, and two
products of matrices, cuBLAS's, add P^T dO + dS^T Q to the keys' gradients in fp32. They take 16 KiB
where the sums of backward.py take 144, and nothing is added in an order that may vary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from absorbed_mla.kernels.hopper.backward_delta import delta
from absorbed_mla.kernels.hopper.stored_backward_kernel import attend_backward_stored
from absorbed_mla.kernels.hopper.tensor_map import tensor_map
from absorbed_mla.kernels.hopper.tile import KEYS, tile_shape
from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.scratch import not_filled

_KEYS = KEYS.value


def backward_stored(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    tiles: Tensor,
    parts: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what ``forward`` took.

    Args:
        grad_out: [S_q, B, N, C].
        grad_lse: [S_q, B, N], or None where the LSE was not used.
        out: [S_q, B, N, C], possibly over more keys than these.
        lse: fp32 [S_q, B, N], over the same keys as ``out``.
        q_content: bf16 or fp16 [S_q, B, N, C].
        q_rope: [S_q, B, N, R].
        latent: [S_k, B, C].
        k_rope: [S_k, B, R].
        tiles: int32 [tiles, 5], those of each part one after the other.
        parts: int64 [parts, 6] on the CPU: the first token and the end of each run of tokens, the
            first key that they see and the end, and where their tiles begin and end.
        scale: Multiplies the scores.

    Returns:
        Gradients of q_content and q_rope in their dtype, and of [latent | k_rope] in fp32,
        [S_k, B, C + R]; the latent's is that of the key and of the value.
    """
    keys, batch, kv_lora_rank = latent.shape
    heads, rope = q_rope.shape[2:]
    tokens, packed = tile_shape(heads)
    # Tokens that see nothing are in no part.
    dq_content, dq_rope = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_content, q_rope)
    )
    dkv = latent.new_zeros((keys, batch, kv_lora_rank + rope), dtype=torch.float32)
    grad_out = grad_out.to(q_content.dtype)
    if not parts.numel() or not batch:
        return dq_content, dq_rope, dkv
    maps = (
        tensor_map(q_content, (tokens, 1, packed, kv_lora_rank)),
        tensor_map(q_rope, (tokens, 1, packed, rope)),
        tensor_map(grad_out, (tokens, 1, packed, kv_lora_rank)),
        tensor_map(latent, (_KEYS, 1, kv_lora_rank // 2)),
        tensor_map(k_rope, (_KEYS, 1, rope)),
    )
    rows = lse.contiguous(), delta(grad_out, grad_lse, out)
    first_blocks = parts[:, 2] // _KEYS
    part_blocks = (parts[:, 3] + _KEYS - 1) // _KEYS - first_blocks
    pairs = (parts[:, 1] - parts[:, 0]) * part_blocks * (_KEYS * batch * heads)
    with not_filled():
        scratch = q_content.new_empty(2, int(pairs.max()))
    for part, first_block, blocks in zip(
        parts.tolist(), first_blocks.tolist(), part_blocks.tolist()
    ):
        start, end, *_, first_tile, last_tile = part
        shape = batch, end - start, heads, blocks * _KEYS
        probs, grad_scores = (x[: math.prod(shape)].view(shape) for x in scratch)
        launch(
            attend_backward_stored,
            ((last_tile - first_tile) * batch * (heads // packed),),
            *maps,
            *(tensor_map(x, (1, tokens, packed, _KEYS)) for x in (probs, grad_scores)),
            *rows,
            tiles[first_tile:last_tile],
            dq_content,
            dq_rope,
            batch,
            heads,
            start,
            first_block,
            blocks,
            scale,
            C=kv_lora_rank,
            R=rope,
            HEADS=packed,
            num_warps=8,
        )
        q = torch.cat((q_content[start:end], q_rope[start:end]), -1)
        seen = slice(first_block * _KEYS, min((first_block + blocks) * _KEYS, keys))
        _add_products(dkv[seen], probs, grad_scores, grad_out[start:end], q)
    return dq_content, dq_rope, dkv


def _add_products(dkv: Tensor, probs: Tensor, grad_scores: Tensor, grad_out: Tensor, q: Tensor):
    """Add P^T dO + dS^T Q.

    Args:
        dkv: fp32 [keys, B, C + R].
        probs: P, [B, tokens, N, at least as many keys].
        grad_scores: dS, likewise.
        grad_out: dO, [tokens, B, N, C].
        q: [tokens, B, N, C + R].
    """
    for b in range(dkv.shape[1]):
        p, ds = (x[b].flatten(0, 1)[:, : len(dkv)].t() for x in (probs, grad_scores))
        of_keys = dkv[:, b]
        of_keys += _product(ds, q[:, b].flatten(0, 1))
        of_keys[:, : grad_out.shape[-1]] += _product(p, grad_out[:, b].flatten(0, 1))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """In fp32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
