"""KL target of the indexer: the attention's probabilities, summed over heads.

Scores of a tile are computed for one head after the other (visible keys) or for some heads of one
query (chosen keys), turned into probabilities by the LSE, and added up in registers: no more than
one sum per query and key reaches memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.triton.common import (
    LOG2_E,
    interpreted,
    load_rows,
    precision,
    product,
    rows_contiguous,
    strides_of,
)
from absorbed_mla.kernels.triton.launch import launch_for
from absorbed_mla.kernels.triton_private import sum_combine

_CHOSEN = 64


def visible_target(
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    queries: slice,
    key_start: int,
    num_keys: int,
    offset: int | None,
    scale: float,
) -> Tensor:
    """The sum over heads of ``exp(scale * query . key - lse)`` for a run of keys.

    Args:
        operands: q_content [S_q, B, N, C], q_rope [S_q, B, N, R], latent [S_k, B, C] and k_rope
            [S_k, B, R], as the ``triton`` kernels take them.
        lse: fp32 [S_q, B, N].
        queries: Which, from ``start`` to ``stop``.
        key_start: First key.
        num_keys: How many follow, the first included.
        offset: Query i of these sees keys 0 .. i + offset; None for all.
        scale: Multiplies the scores.

    Returns:
        fp32 [B, Q, num_keys]; 0 where a query does not see a key.
    """
    q_content, q_rope, latent, k_rope = rows_contiguous(*operands)
    q_content, q_rope, lse = q_content[queries], q_rope[queries], lse[queries].contiguous()
    count, batch, heads, kv_lora_rank = q_content.shape
    out = torch.empty(batch, count, num_keys, dtype=torch.float32, device=lse.device)
    blocks = launch_for(q_content.dtype, kv_lora_rank, q_rope.shape[-1], lse.device)
    rows, keys, _ = blocks.forward
    if out.numel():
        _visible_kernel[(triton.cdiv(num_keys, keys), triton.cdiv(count, rows), batch)](
            q_content,
            q_rope,
            latent[key_start:],
            k_rope[key_start:],
            lse,
            out,
            *strides_of(q_content, q_rope, latent, k_rope),
            count,
            num_keys,
            num_keys if offset is None else offset,
            heads,
            scale * LOG2_E.value,
            C=kv_lora_rank,
            R=q_rope.shape[-1],
            BLOCK_M=rows,
            BLOCK_N=keys,
            PRECISION=precision(q_content.dtype),
            INTERPRETED=interpreted(),
            num_warps=blocks.warps,
            num_stages=1,
        )
    return out


def chosen_target(
    operands: tuple[Tensor, Tensor, Tensor, Tensor], lse: Tensor, chosen: Tensor, scale: float
) -> Tensor:
    """The sum over heads of ``exp(scale * query . key - lse)`` for chosen keys.

    Args:
        operands: As in :func:`visible_target`, all queries.
        lse: fp32 [S_q, B, N].
        chosen: int32 [S_q, B, topk], -1 for none, anywhere.
        scale: Multiplies the scores.

    Returns:
        fp32 [B, S_q, topk]; 0 where there is no key.
    """
    q_content, q_rope, latent, k_rope = rows_contiguous(*operands)
    count, batch, heads, kv_lora_rank = q_content.shape
    chosen, lse = chosen.contiguous(), lse.contiguous()
    topk = chosen.shape[2]
    out = torch.empty(batch, count, topk, dtype=torch.float32, device=lse.device)
    blocks = launch_for(q_content.dtype, kv_lora_rank, q_rope.shape[-1], lse.device)
    keys = min(_CHOSEN, blocks.forward.keys)
    if out.numel():
        _chosen_kernel[(count, triton.cdiv(topk, keys), batch)](
            q_content,
            q_rope,
            latent,
            k_rope,
            lse,
            chosen,
            out,
            *strides_of(q_content, q_rope, latent, k_rope),
            topk,
            heads,
            scale * LOG2_E.value,
            C=kv_lora_rank,
            R=q_rope.shape[-1],
            BLOCK_M=min(blocks.forward.rows, max(16, triton.next_power_of_2(heads))),
            BLOCK_N=keys,
            PRECISION=precision(q_content.dtype),
            INTERPRETED=interpreted(),
            num_warps=blocks.warps,
            num_stages=1,
        )
    return out


@triton.jit
def _probabilities(qc, qr, kc, kr, lse, scale_log2, R: tl.constexpr, HOW: tl.constexpr):
    """exp2(scale_log2 * scores - lse), [BLOCK_M, BLOCK_N]; 0 in a row whose LSE is -inf."""
    PRECISION: tl.constexpr = HOW[0]
    INTERPRETED: tl.constexpr = HOW[1]
    scores = tl.full([qc.shape[0], kc.shape[0]], 0.0, tl.float32)
    scores = product(qc, tl.trans(kc), scores, PRECISION, INTERPRETED)
    if R > 0:
        scores = product(qr, tl.trans(kr), scores, PRECISION, INTERPRETED)
    blind = lse == float("-inf")
    found = tl.exp2(scores * scale_log2 - tl.where(blind, 0.0, lse)[:, None])
    return tl.where(blind[:, None], 0.0, found)


@triton.jit
def _visible_kernel(
    q_content_ptr,
    q_rope_ptr,
    latent_ptr,
    k_rope_ptr,
    lse_ptr,
    out_ptr,
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
    queries,
    num_keys,
    offset,
    heads,
    scale_log2,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Some queries and keys of an entry of the batch."""
    batch, batches = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    key = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid, there = token < queries, key < num_keys
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    last = tl.minimum((tl.program_id(1) + 1) * BLOCK_M, queries) - 1
    if tl.program_id(0) * BLOCK_N <= last + offset:
        rows = key.to(tl.int64)
        kc = load_rows(latent_ptr, batch * stride_kc_b + rows * stride_kc_s, there, C)
        if R > 0:
            kr = load_rows(k_rope_ptr, batch * stride_kr_b + rows * stride_kr_s, there, R)
        else:
            kr = kc
        for number in range(heads):
            head = tl.full([], number, tl.int64)  # heads may be a whole sequence apart
            qc_rows = batch * stride_qc_b + token * stride_qc_s
            qc = load_rows(q_content_ptr + head * stride_qc_n, qc_rows, valid, C)
            if R > 0:
                qr_rows = batch * stride_qr_b + token * stride_qr_s
                qr = load_rows(q_rope_ptr + head * stride_qr_n, qr_rows, valid, R)
            else:
                qr = qc
            row = (token * batches + batch) * heads + head
            lse = tl.load(lse_ptr + row, mask=valid, other=0.0) * LOG2_E
            total += _probabilities(qc, qr, kc, kr, lse, scale_log2, R, (PRECISION, INTERPRETED))
    seen = key[None, :] <= token[:, None] + offset
    pointers = out_ptr + (batch * queries + token)[:, None] * num_keys + key[None, :]
    tl.store(pointers, tl.where(seen, total, 0.0), mask=valid[:, None] & there[None, :])


@triton.jit
def _chosen_kernel(
    q_content_ptr,
    q_rope_ptr,
    latent_ptr,
    k_rope_ptr,
    lse_ptr,
    chosen_ptr,
    out_ptr,
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
    topk,
    heads,
    scale_log2,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Some of the keys of one query."""
    token, queries = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    batch, batches = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = place < topk
    key = tl.load(chosen_ptr + (token * batches + batch) * topk + place, mask=inside, other=-1)
    there = key >= 0
    key = tl.where(there, key, 0).to(tl.int64)
    kc = load_rows(latent_ptr, batch * stride_kc_b + key * stride_kc_s, there, C)
    if R > 0:
        kr = load_rows(k_rope_ptr, batch * stride_kr_b + key * stride_kr_s, there, R)
    else:
        kr = kc
    total = tl.full([BLOCK_N], 0.0, tl.float32)
    for first in range(0, heads, BLOCK_M):
        head = first + tl.arange(0, BLOCK_M).to(tl.int64)
        valid = head < heads
        qc_rows = batch * stride_qc_b + token * stride_qc_s + head * stride_qc_n
        qc = load_rows(q_content_ptr, qc_rows, valid, C)
        if R > 0:
            qr_rows = batch * stride_qr_b + token * stride_qr_s + head * stride_qr_n
            qr = load_rows(q_rope_ptr, qr_rows, valid, R)
        else:
            qr = qc
        row = (token * batches + batch) * heads + head
        # Heads that are not there have the LSE of a query without keys.
        lse = tl.load(lse_ptr + row, mask=valid, other=float("-inf")) * LOG2_E
        found = _probabilities(qc, qr, kc, kr, lse, scale_log2, R, (PRECISION, INTERPRETED))
        total += tl.reduce(found, 0, sum_combine)
    pointers = out_ptr + (batch * queries + token) * topk + place
    tl.store(pointers, tl.where(there, total, 0.0), mask=inside)
