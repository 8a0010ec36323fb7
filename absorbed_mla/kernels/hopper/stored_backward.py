"""Launcher of the deterministic Hopper backward, by stored P and dS: always the same bits.

Some tokens at a time: a kernel stores P and dS in the dtype of the query, and three products of
matrices, cuBLAS's, make dQ = dS K and add P^T dO + dS^T Q to the keys' gradients in fp32. What is
stored of 64 rows and 64 keys are 16 KiB where the sums of backward.py take 144, and nothing is
added in an order that may vary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from absorbed_mla.kernels.hopper.stored_backward_kernel import attend_backward_stored
from absorbed_mla.kernels.hopper.stored_backward_shared import CHUNK, KEYS
from absorbed_mla.kernels.hopper.tensor_map import tensor_map
from absorbed_mla.kernels.hopper.tile import tile_shape
from absorbed_mla.kernels.latent_backward import LatentBackward
from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.paged.plan import processors
from absorbed_mla.kernels.scratch import not_filled
from absorbed_mla.kernels.transposed_product import transposed_product
from absorbed_mla.kernels.triton.backward import delta_of

_CHUNK, _KEYS = CHUNK.value, KEYS.value


def backward_stored(
    call: LatentBackward, tiles: Tensor, parts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what ``forward`` took.

    Args:
        call: The arguments.
        tiles: int32 [tiles, 5], those of each part one after the other.
        parts: int64 [parts, 6] on the CPU: the first token and the end of each run of tokens, the
            first key that they see and the end, and where their tiles begin and end.

    Returns:
        As :class:`LatentBackward` says.
    """
    call = call.cast()
    grad_out, grad_lse, out, lse, q_content, q_rope, latent, k_rope, scale = call
    batch, kv_lora_rank = latent.shape[1:]
    heads, rope = q_rope.shape[2:]
    tokens, packed = tile_shape(heads)
    # Tokens that see nothing are in no part.
    whole = int((parts[:, 1] - parts[:, 0]).sum()) == len(q_content) and batch > 0
    make = torch.empty_like if whole else torch.zeros_like
    with not_filled():
        dq_content, dq_rope = (
            make(x, memory_format=torch.contiguous_format) for x in (q_content, q_rope)
        )
    dkv = call.zero_key_gradients()
    if not parts.numel() or not batch:
        return dq_content, dq_rope, dkv
    maps = (
        tensor_map(q_content, (tokens, 1, packed, _CHUNK)),
        tensor_map(q_rope, (tokens, 1, packed, rope)),
        tensor_map(grad_out, (tokens, 1, packed, _CHUNK)),
        tensor_map(latent, (_KEYS, 1, _CHUNK)),
        tensor_map(k_rope, (_KEYS, 1, rope)),
    )
    rows = lse.contiguous(), delta_of(grad_out, grad_lse, out)
    kv = torch.cat((latent, k_rope), -1)
    part_blocks = (parts[:, 3] - parts[:, 2] + _KEYS - 1) // _KEYS
    pairs = (parts[:, 1] - parts[:, 0]) * part_blocks * (_KEYS * batch * heads)
    with not_filled():
        scratch = q_content.new_empty(2, int(pairs.max()))
    for part, blocks in zip(parts.tolist(), part_blocks.tolist()):
        start, end, first_key, last_key, first_tile, last_tile = part
        shape = batch, end - start, heads, blocks * _KEYS
        probs, grad_scores = (x[: math.prod(shape)].view(shape) for x in scratch)
        total = (last_tile - first_tile) * batch * (heads // packed)
        # One program takes all shared memory of a multiprocessor.
        launch(
            attend_backward_stored,
            (min(total, processors(q_content.device)),),
            *maps,
            *(tensor_map(x, (1, tokens, packed, _KEYS)) for x in (probs, grad_scores)),
            *rows,
            tiles[first_tile:last_tile],
            total,
            batch,
            heads,
            start,
            blocks,
            scale,
            C=kv_lora_rank,
            R=rope,
            HEADS=packed,
            num_warps=4,
        )
        seen = slice(first_key, last_key)
        stored = [x[..., : last_key - first_key] for x in (probs, grad_scores)]
        tokens_of = (x[start:end] for x in (q_content, q_rope, grad_out, dq_content, dq_rope))
        _multiply(stored, tokens_of, kv[seen], dkv[seen])
    return dq_content, dq_rope, dkv


def _multiply(stored: list[Tensor], rows: Iterable[Tensor], kv: Tensor, dkv: Tensor) -> None:
    """Set dQ = dS K, and add dS^T Q + P^T dO to the keys' gradient.

    Args:
        stored: P and dS, [B, tokens, N, keys].
        rows: The query's two parts, dO and the parts of dQ, [tokens, B, N, C or R].
        kv: [keys, B, C + R].
        dkv: fp32 [keys, B, C + R].
    """
    q_content, q_rope, grad_out, dq_content, dq_rope = rows
    *shape, rope = q_rope.shape
    widths = q_content.shape[-1], rope
    q = torch.cat((q_content, q_rope), -1)
    for b in range(kv.shape[1]):
        p, ds = (x[b].flatten(0, 1) for x in stored)
        dq = torch.mm(ds, kv[:, b]).view(shape[0], shape[2], -1)
        for part, gradient in zip(dq.split(widths, -1), (dq_content, dq_rope)):
            gradient[:, b] = part
        of_keys = dkv[:, b]
        of_keys += transposed_product(ds, q[:, b].flatten(0, 1))
        of_keys[:, : widths[0]] += transposed_product(p, grad_out[:, b].flatten(0, 1))
