"""The ``triton`` forward: one block of query rows, all keys that it sees, an online softmax.

The softmax is that of FlashAttention (arXiv:2205.14135): the output and the sum of exponentials are
scaled down whenever a row meets a larger score. Keys are loaded once and serve as values too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.triton.common import (
    LN_2,
    LOG2_E,
    interpreted,
    load_rows,
    narrow,
    precision,
    product,
    row_max,
    row_sum,
    rows_contiguous,
    store_rows,
    strides_of,
)
from absorbed_mla.kernels.triton.launch import launch_for, pack


def forward(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    tiles: Tensor,
    scale: float,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with scores ``scale * (q_content . latent + q_rope . k_rope)`` and values latent.

    Args:
        q_content: [S_q, B, N, C], bf16, fp16 or fp32; C a power of two, at least 16.
        q_rope: [S_q, B, N, R]; R likewise, or 0.
        latent: [S_k, B, C].
        k_rope: [S_k, B, R].
        tiles: Of ``query_tiles`` with ``query_tokens`` tokens and the length of the query axis,
            int32 [tiles, 5] on the device: they must cover every query.
        scale: Multiplies the scores.
        largest: Gets the largest score of every row, -inf where it sees no key: [S_q, B, N] fp32,
            contiguous; or None.

    Returns:
        Output [S_q, B, N, C] in the dtype of the query and LSE [S_q, B, N] in fp32; 0 and -inf for
        a query that sees no key.
    """
    q_content, q_rope, latent, k_rope = rows_contiguous(q_content, q_rope, latent, k_rope)
    tokens, batch, heads, kv_lora_rank = q_content.shape
    out = torch.empty_like(q_content, memory_format=torch.contiguous_format)
    lse = torch.empty((tokens, batch, heads), dtype=torch.float32, device=q_content.device)
    launch = launch_for(q_content.dtype, kv_lora_rank, q_rope.shape[-1], q_content.device)
    rows, keys, stages = launch.forward
    packing = pack(heads, rows)
    grid = (len(tiles) * (heads // packing.heads), batch)
    if not all(grid):
        return out, lse
    _forward_kernel[grid](
        q_content,
        q_rope,
        latent,
        k_rope,
        out,
        lse,
        lse if largest is None else largest,
        tiles,
        *strides_of(q_content, q_rope, latent, k_rope, out, lse),
        scale * LOG2_E.value,
        heads // packing.heads,
        C=kv_lora_rank,
        R=q_rope.shape[-1],
        HB=packing.heads,
        BLOCK_M=rows,
        BLOCK_N=keys,
        PRECISION=precision(q_content.dtype),
        RECORD=largest is not None,
        INTERPRETED=interpreted(),
        num_warps=launch.warps,
        num_stages=stages,
    )
    return out, lse


@triton.jit
def _forward_kernel(
    q_content_ptr,
    q_rope_ptr,
    latent_ptr,
    k_rope_ptr,
    out_ptr,
    lse_ptr,
    largest_ptr,
    tiles_ptr,
    stride_qc_s,
    stride_qc_b,
    stride_qc_n,
    stride_qr_s,
    stride_qr_b,
    stride_qr_n,
    stride_kc_s,
    stride_kc_b,
    stride_kr_s,
    stride_kr_b,
    stride_o_s,
    stride_o_b,
    stride_o_n,
    stride_l_s,
    stride_l_b,
    scale_log2,
    head_blocks,
    C: tl.constexpr,
    R: tl.constexpr,
    HB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    RECORD: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tile = tiles_ptr + (tl.program_id(0) // head_blocks).to(tl.int64) * 5
    query_start, query_end = tl.load(tile), tl.load(tile + 1)
    key_start, key_end, offset = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    batch = tl.program_id(1).to(tl.int64)

    # [BLOCK_M]; a row is a head of a token
    row = tl.arange(0, BLOCK_M)
    token = query_start + row // HB
    head = ((tl.program_id(0) % head_blocks) * HB + row % HB).to(tl.int64)
    valid = token < query_end
    last_key = row // HB + offset  # that the row sees, counted from key_start
    token = token.to(tl.int64)
    # [BLOCK_M, C], [BLOCK_M, R]
    qc_rows = batch * stride_qc_b + token * stride_qc_s + head * stride_qc_n
    qc = load_rows(q_content_ptr, qc_rows, valid, C)
    if R > 0:
        qr_rows = batch * stride_qr_b + token * stride_qr_s + head * stride_qr_n
        qr = load_rows(q_rope_ptr, qr_rows, valid, R)
    else:
        qr = qc

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, C], 0.0, tl.float32)
    for start in range(key_start, key_end, BLOCK_N):
        # [BLOCK_N]
        key = start + tl.arange(0, BLOCK_N)
        there = key < key_end
        kc_rows = batch * stride_kc_b + key.to(tl.int64) * stride_kc_s
        # [BLOCK_N, C]; zero beyond the last key, where anything may lie: 0 * NaN is NaN.
        kc = load_rows(latent_ptr, kc_rows, there, C)
        if R > 0:
            kr_rows = batch * stride_kr_b + key.to(tl.int64) * stride_kr_s
            kr = load_rows(k_rope_ptr, kr_rows, there, R)
        else:
            kr = kc
        seen = ((key - key_start)[None, :] <= last_key[:, None]) & there[None, :]
        largest, total, acc = attend_to_keys(
            qc, qr, kc, kr, seen, largest, total, acc, scale_log2, R, PRECISION, INTERPRETED
        )

    acc, lse = normalised(largest, total, acc)
    out_rows = batch * stride_o_b + token * stride_o_s + head * stride_o_n
    store_rows(out_ptr, out_rows, valid, acc, C, INTERPRETED)
    index = batch * stride_l_b + token * stride_l_s + head
    tl.store(lse_ptr + index, lse * LN_2, mask=valid)
    if RECORD:
        tl.store(largest_ptr + index, largest * LN_2, mask=valid)


@triton.jit
def attend_to_keys(
    qc,
    qr,
    kc,
    kr,
    seen,
    largest,
    total,
    acc,
    scale_log2,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One step of the online softmax; all kernels that use it compute bitwise the same.

    Args:
        qc: Queries [BLOCK_M, C].
        qr: [BLOCK_M, R]; unused where R is 0.
        kc: Keys and values [BLOCK_N, C]; finite also where unseen.
        kr: [BLOCK_N, R]; unused where R is 0.
        seen: [BLOCK_M, BLOCK_N].
        largest: Largest score so far [BLOCK_M], to base 2: scores are multiplied by log2(e).
        total: Sum of exponentials [BLOCK_M].
        acc: Sum of values [BLOCK_M, C].
        scale_log2: Multiplies the scores.
        R: Width of the rope part.
        PRECISION: Of the products.
        INTERPRETED: Whether this runs in the interpreter.

    Returns:
        The new largest, total and acc.
    """
    # [BLOCK_M, BLOCK_N]
    scores = tl.full([qc.shape[0], kc.shape[0]], 0.0, tl.float32)
    scores = product(qc, tl.trans(kc), scores, PRECISION, INTERPRETED)
    if R > 0:
        scores = product(qr, tl.trans(kr), scores, PRECISION, INTERPRETED)
    scores = tl.where(seen, scores * scale_log2, float("-inf"))
    larger = tl.maximum(largest, row_max(scores))
    # -inf - -inf would be NaN in a row that has seen nothing.
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    probs = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(largest - shift)
    total = total * decay + row_sum(probs)
    probs = narrow(probs, kc.dtype, INTERPRETED)
    acc = product(probs, kc, acc * decay[:, None], PRECISION, INTERPRETED)
    return larger, total, acc


@triton.jit
def normalised(largest, total, acc):
    """Output [BLOCK_M, C] and LSE [BLOCK_M] to base 2; 0 and -inf for a row that sees no key."""
    blind = total == 0.0
    out = acc / tl.where(blind, 1.0, total)[:, None]
    return out, tl.where(blind, float("-inf"), largest + tl.log2(total))
