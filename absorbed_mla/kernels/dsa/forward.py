"""Sparse attention forward: one tile of query rows, all keys of its list, an online softmax."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.dsa.key_lists import HeadTile, KeyLists, query_tile, token_tile
from absorbed_mla.kernels.dsa.splits import merge_splits, splits_for
from absorbed_mla.kernels.dsa.tile import keys_of_entries, list_entries, listed_keys, tile_rows
from absorbed_mla.kernels.fp8_latents import GROUP, decoded_keys, load_fp8_rows
from absorbed_mla.kernels.triton.common import (
    LN_2,
    LOG2_E,
    interpreted,
    load_rows,
    precision,
    rows_contiguous,
    store_rows,
)
from absorbed_mla.kernels.triton.forward import attend_to_keys, normalised
from absorbed_mla.kernels.triton.launch import launch_for

# Keys of a block of tiles of several tokens, or of FP8 rows, at most; 64 need a stack on Hopper.
_KEYS = 32


def attend(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    lists_of: Callable[[int, int, int], KeyLists],
    topk: int,
    scale: float,
    scales: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention with scores ``scale * (q_content . latent + q_rope . k_rope)`` and values latent.

    In parity mode every tile has one token and all of its keys, however many tokens there are:
    training and generation give a token the same bits if its keys come in the same order.

    Args:
        q_content: [S_q, B, N, C], bf16, fp16 or fp32; C a power of two, at least 16.
        q_rope: [S_q, B, N, R]; R likewise, or 0.
        latent: [S_k, B, C]; of FP8 rows uint8.
        k_rope: [S_k, B, R]; of FP8 rows bf16.
        lists_of: The lists of the keys for (S_k, tokens of a tile, splits), as ``key_lists``.
        topk: Most keys of a query.
        scale: Multiplies the scores.
        scales: Of FP8 rows, fp32 [S_k, B, C / 128]; None for others.
        batch_invariant: Whether this is parity mode.

    Returns:
        Output [S_q, B, N, C] in the dtype of the query and LSE [S_q, B, N] in fp32; 0 and -inf for
        a query without keys.
    """
    operands = rows_contiguous(q_content, q_rope, latent, k_rope)
    queries, batch, heads, kv_lora_rank = q_content.shape
    launch = launch_for(q_content.dtype, kv_lora_rank, q_rope.shape[-1], q_content.device)
    rows, keys, _ = launch.forward
    if batch_invariant:
        tile, splits = token_tile(heads, rows, least=16), 1
    else:
        tile = query_tile(heads, rows, queries, len(latent), least=16)
        splits = splits_for(queries, batch, heads, topk)
        if tile.tokens > 1 or scales is not None:
            keys = min(_KEYS, keys)
    lists = lists_of(len(latent), tile.tokens, splits)
    if splits == 1:
        return _attend_to_lists(*operands, scales, lists, tile, keys, scale, q_content.dtype)
    # As entries of a batch, all with the same query and keys.
    operands = tuple(x.expand(-1, splits, *x.shape[2:]) for x in operands)
    if scales is not None:
        scales = scales.expand(-1, splits, -1)
    return merge_splits(
        *_attend_to_lists(*operands, scales, lists, tile, keys, scale, torch.float32),
        q_content.dtype,
    )


def _attend_to_lists(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    scales: Tensor | None,
    lists: KeyLists,
    tile: HeadTile,
    keys: int,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """As :func:`attend`, in one launch with these lists and tiles; output in ``dtype``.

    ``keys`` of a list are computed at a time.
    """
    queries, batch, heads, kv_lora_rank = q_content.shape
    out = q_content.new_empty(q_content.shape, dtype=dtype)
    lse = torch.empty((queries, batch, heads), dtype=torch.float32, device=q_content.device)
    launch = launch_for(q_content.dtype, kv_lora_rank, q_rope.shape[-1], q_content.device)
    grid = (len(lists.entries) * tile.blocks, batch)
    if not all(grid):
        return out, lse
    fp8 = scales is not None
    scales = latent if scales is None else scales  # any tensor where there are none
    _forward_kernel[grid](
        q_content,
        q_rope,
        latent,
        scales,
        k_rope,
        out,
        lse,
        *lists[:2],
        *q_content.stride()[:3],
        *q_rope.stride()[:3],
        *latent.stride()[:2],
        *scales.stride()[:2],
        *k_rope.stride()[:2],
        queries,
        heads,
        tile.blocks,
        lists.entries.shape[2],
        scale * LOG2_E.value,
        C=kv_lora_rank,
        R=q_rope.shape[-1],
        HB=tile.heads,
        TOKENS=tile.tokens,
        BLOCK_N=keys,
        GROUP=min(GROUP, kv_lora_rank) if fp8 else 0,
        PRECISION=precision(q_content.dtype),
        INTERPRETED=interpreted(),
        num_warps=launch.warps,
        num_stages=1 if fp8 else launch.forward.stages,
    )
    return out, lse


@triton.jit
def _forward_kernel(
    q_content_ptr,
    q_rope_ptr,
    latent_ptr,
    scales_ptr,
    k_rope_ptr,
    out_ptr,
    lse_ptr,
    entries_ptr,
    counts_ptr,
    stride_qc_s,
    stride_qc_b,
    stride_qc_n,
    stride_qr_s,
    stride_qr_b,
    stride_qr_n,
    stride_kc_s,
    stride_kc_b,
    stride_sc_s,
    stride_sc_b,
    stride_kr_s,
    stride_kr_b,
    queries,
    heads,
    head_blocks,
    length,
    scale_log2,
    C: tl.constexpr,
    R: tl.constexpr,
    HB: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    batch, batches = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    tile, token, head, own, valid = tile_rows(0, queries, heads, head_blocks, TOKENS, HB)
    number = tile.to(tl.int64) * batches + batch
    list_ptr, count = entries_ptr + number * length, tl.load(counts_ptr + number)
    # [rows, C], [rows, R]
    qc_rows = batch * stride_qc_b + token * stride_qc_s + head * stride_qc_n
    qc = load_rows(q_content_ptr, qc_rows, valid, C)
    if R > 0:
        qr_rows = batch * stride_qr_b + token * stride_qr_s + head * stride_qr_n
        qr = load_rows(q_rope_ptr, qr_rows, valid, R)
    else:
        qr = qc

    largest = tl.full([TOKENS * HB], float("-inf"), tl.float32)
    total = tl.full([TOKENS * HB], 0.0, tl.float32)
    acc = tl.full([TOKENS * HB, C], 0.0, tl.float32)
    parts = latent_ptr, scales_ptr, k_rope_ptr
    strides = stride_kc_s, stride_kc_b, stride_sc_s, stride_sc_b, stride_kr_s, stride_kr_b
    if GROUP:
        entry = list_entries(list_ptr, 0, count, BLOCK_N)
        raw = _load_fp8(parts, strides, batch, entry, own, TOKENS, C, R, GROUP)
        following = list_entries(list_ptr, BLOCK_N, count, BLOCK_N)
    for start in range(0, count, BLOCK_N):
        # [BLOCK_N, C]
        if GROUP:
            _, _, seen = keys_of_entries(entry, own, TOKENS)
            kc, kr = decoded_keys(raw, qc.dtype, C, GROUP, INTERPRETED)
            # The pipeliner copies nothing ahead that is not an operand as it lies.
            entry = following
            raw = _load_fp8(parts, strides, batch, entry, own, TOKENS, C, R, GROUP)
            following = list_entries(list_ptr, start + 2 * BLOCK_N, count, BLOCK_N)
        else:
            key, there, seen = listed_keys(list_ptr, start, count, own, TOKENS, BLOCK_N)
            kc = load_rows(latent_ptr, batch * stride_kc_b + key * stride_kc_s, there, C)
            if R > 0:
                kr = load_rows(k_rope_ptr, batch * stride_kr_b + key * stride_kr_s, there, R)
            else:
                kr = kc
        largest, total, acc = attend_to_keys(
            qc, qr, kc, kr, seen, largest, total, acc, scale_log2, R, PRECISION, INTERPRETED
        )

    acc, lse = normalised(largest, total, acc)
    row = (token * batches + batch) * heads + head
    store_rows(out_ptr, row * C, valid, acc, C, INTERPRETED)
    tl.store(lse_ptr + row, lse * LN_2, mask=valid)


@triton.jit
def _load_fp8(
    parts,
    strides,
    batch,
    entry,
    own,
    TOKENS: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
):
    """:func:`load_fp8_rows` of the entries [BLOCK_N] of a list."""
    key, there, _ = keys_of_entries(entry, own, TOKENS)
    values = batch * strides[1] + key * strides[0]
    scales = batch * strides[3] + key * strides[2]
    k_rope = batch * strides[5] + key * strides[4]
    return load_fp8_rows(parts, (values, scales, k_rope), there, C, R, GROUP)
