"""Launcher of the Hopper sparse attention forward over chosen keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from absorbed_mla.kernels.dsa.key_lists import KeyLists, query_tile
from absorbed_mla.kernels.dsa.splits import merge_splits, splits_for
from absorbed_mla.kernels.hopper.layouts import SWIZZLED
from absorbed_mla.kernels.hopper.sparse_forward_kernel import attend_sparse_forward
from absorbed_mla.kernels.hopper.tensor_map import tensor_map
from absorbed_mla.kernels.hopper.tile import ROWS
from absorbed_mla.kernels.launch import launch

# Products wait for the latents' columns in so many chunks, or fewer.
_CHUNKS = 4


def attend(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    lists_of: Callable[[int, int, int], KeyLists],
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention with scores ``scale * (q_content . latent + q_rope . k_rope)`` and values latent.

    Args:
        q_content: [S_q, B, N, C] in bf16 or fp16; C = 128, 256 or 512.
        q_rope: [S_q, B, N, R]; R = 64.
        latent: [S_k, B, C].
        k_rope: [S_k, B, R].
        lists_of: The lists of the keys for (S_k, tokens of a tile, splits), as ``key_lists``.
        topk: Most keys of a query.
        scale: Multiplies the scores.

    Returns:
        Output [S_q, B, N, C] in the dtype of the query and LSE [S_q, B, N] in fp32; 0 and -inf for
        a query without keys.

    Raises:
        ValueError: The scale is not positive.
    """
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    queries, batch, heads, kv_lora_rank = q_content.shape
    rope = q_rope.shape[3]
    splits = splits_for(queries, batch, heads, topk)
    parts = queries, batch * splits, heads
    dtype = q_content.dtype if splits == 1 else torch.float32
    out = q_content.new_empty(*parts, kv_lora_rank, dtype=dtype)
    lse = q_content.new_empty(parts, dtype=torch.float32)
    if not lse.numel() or not len(latent):
        nothing = q_content.new_zeros(q_content.shape)
        return nothing, lse.new_full(q_content.shape[:3], -math.inf)
    tile = query_tile(heads, ROWS.value, queries, len(latent), least=ROWS.value)
    lists = lists_of(len(latent), tile.tokens, splits)
    launch(
        attend_sparse_forward,
        (lists.counts.numel() * tile.blocks,),
        tensor_map(q_content, (tile.tokens, 1, tile.heads, kv_lora_rank)),
        tensor_map(q_rope, (tile.tokens, 1, tile.heads, rope)),
        *rows_of_16_bytes(latent, k_rope),
        *lists[:3],
        out,
        lse,
        lists.entries.shape[2],
        queries,
        parts[1],
        splits,
        heads,
        scale / math.log(2),
        HEADS=tile.heads,
        C=kv_lora_rank,
        R=rope,
        CHUNK=max(kv_lora_rank // _CHUNKS, SWIZZLED.value),
        num_warps=4,
    )
    return (out, lse) if splits == 1 else merge_splits(out, lse, q_content.dtype)


def rows_of_16_bytes(*operands: Tensor) -> tuple[Tensor | int, ...]:
    """The keys' rows, or copies, and the strides of keys and entries of the batch of each.

    The kernels copy 16 bytes at a time, and compile only where strides are known to allow that:
    Triton looks whether an address in bytes, and a stride in elements, is a multiple of 16.

    Args:
        operands: [S_k, B, W], W a multiple of 16.
    """
    rows: list[Tensor] = []
    strides: list[int] = []
    for x in operands:
        found = _strides(x)
        if x.stride(2) != 1 or x.data_ptr() % 16 or any(s % 16 for s in found):
            x = x.clone(memory_format=torch.contiguous_format)
            found = _strides(x)
        rows.append(x)
        strides += found
    return *rows, *strides


def _strides(x: Tensor) -> tuple[int, int]:
    """Of the first two axes; 0 of an axis of one element, whose stride may be anything."""
    key, entry = (s if n > 1 else 0 for n, s in zip(x.shape[:2], x.stride()))
    return key, entry
