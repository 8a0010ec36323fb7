"""The indexer's scores of chosen keys, and their gradient: a program has one query."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.dsa.key_lists import key_lists
from absorbed_mla.kernels.dsa.key_sums import add_in_order
from absorbed_mla.kernels.triton.common import (
    interpreted,
    load_rows,
    narrow,
    precision,
    product,
    rows_contiguous,
    store_rows,
)

_KEYS, _MOST_HEADS = 64, 64


def chosen_scores(
    query: Tensor, key: Tensor, weights: Tensor, chosen: Tensor, relu: bool
) -> Tensor:
    """Scores of :func:`index_scores` for chosen keys.

    Args:
        query: [Q, B, Hi, Di], bf16, fp16 or fp32; Di a power of two, at least 16.
        key: [S_k, B, Di].
        weights: fp32 [Q, B, Hi].
        chosen: int32 [Q, B, P], -1 for none, anywhere.
        relu: Whether products pass a ReLU.

    Returns:
        fp32 [B, Q, P]; where there is no key, anything.
    """
    query, key = rows_contiguous(query, key)
    queries, batch = query.shape[:2]
    out = torch.empty(batch, queries, chosen.shape[2], dtype=torch.float32, device=query.device)
    if out.numel():
        _chosen_kernel[(queries, batch)](
            *_arguments(query, key, weights, chosen),
            out,
            out,
            out,
            out,
            **_constants(query, relu, gradient=False, in_order=False),
        )
    return out


def add_chosen_gradient(
    gradient: tuple[Tensor, Tensor, Tensor],
    score_grad: Tensor,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    chosen: Tensor,
    relu: bool,
    deterministic: bool,
) -> None:
    """Add the gradient of :func:`chosen_scores`.

    Args:
        gradient: Of the queries [Q, B, Hi, Di] and of the weights, fp32 [Q, B, Hi], which are
            written, last; between them that of the keys, fp32 [S_k, B, Di], which is added to. All
            contiguous.
        score_grad: fp32 [B, Q, P], 0 where there is no key.
        query: As in the forward.
        key: As in the forward.
        weights: As in the forward.
        chosen: As in the forward.
        relu: As in the forward.
        deterministic: Whether keys are added to in a fixed order; see key_sums.py.
    """
    if not score_grad.numel():
        return
    query, key = rows_contiguous(query, key)
    dq, dk, dw = gradient
    if not deterministic:
        constants = _constants(query, relu, gradient=True, in_order=False)
        _chosen_kernel[tuple(query.shape[:2])](
            *_arguments(query, key, weights, chosen),
            score_grad.contiguous(),
            *gradient,
            **constants,
        )
        return
    constants = _constants(query, relu, gradient=True, in_order=True)
    lists = key_lists(chosen, len(key), tokens=1)
    blocks = triton.cdiv(query.shape[2], constants["BLOCK_M"])

    def write(some: slice, parts: Tensor) -> None:
        _chosen_kernel[(some.stop - some.start, query.shape[1])](
            *_arguments(query[some], key, weights[some], chosen[some]),
            score_grad[:, some].contiguous(),
            dq[some],
            parts,
            dw[some],
            **constants,
        )

    add_in_order(dk, lists, blocks, dk.dtype, write)


def _arguments(query: Tensor, key: Tensor, weights: Tensor, chosen: Tensor) -> tuple:
    strides = *query.stride()[:3], *key.stride()[:2]
    sizes = chosen.shape[2], query.shape[2]
    return query, key, weights.float().contiguous(), chosen.contiguous(), *strides, *sizes


def _constants(query: Tensor, relu: bool, gradient: bool, in_order: bool) -> dict:
    heads = min(_MOST_HEADS, max(16, triton.next_power_of_2(query.shape[2])))
    return {
        "DI": query.shape[3],
        "RELU": relu,
        "GRADIENT": gradient,
        "IN_ORDER": in_order,
        "BLOCK_M": heads,
        "BLOCK_N": _KEYS,
        "PRECISION": precision(query.dtype),
        "INTERPRETED": interpreted(),
        # With the places of what keys get four would spill.
        "num_warps": 8 if in_order else 4,
        "num_stages": 1,
    }


@triton.jit
def _chosen_kernel(
    query_ptr,
    key_ptr,
    weights_ptr,
    chosen_ptr,
    q_s,
    q_b,
    q_h,
    k_s,
    k_b,
    topk,
    heads,
    scores_ptr,
    dq_ptr,
    dk_ptr,
    dw_ptr,
    DI: tl.constexpr,
    RELU: tl.constexpr,
    GRADIENT: tl.constexpr,
    IN_ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Scores of the keys of one query; or, of their gradient in the same place, the gradients.

    In order, what keys get has a place for every entry of ``chosen`` and block of heads.
    """
    token, queries = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    batch, batches = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    own = token * batches + batch
    scores_ptr += (batch * queries + token) * topk
    for first in range(0, heads, BLOCK_M):
        head = first + tl.arange(0, BLOCK_M).to(tl.int64)
        valid = head < heads
        # [BLOCK_M, DI]
        query = load_rows(query_ptr, token * q_s + batch * q_b + head * q_h, valid, DI)
        weight = tl.load(weights_ptr + own * heads + head, mask=valid, other=0.0)
        dq = tl.full([BLOCK_M, DI], 0.0, tl.float32)
        dw = tl.full([BLOCK_M], 0.0, tl.float32)
        for start in range(0, topk, BLOCK_N):
            place = start + tl.arange(0, BLOCK_N)
            entry = tl.load(chosen_ptr + own * topk + place, mask=place < topk, other=-1)
            there = entry >= 0
            key = tl.where(there, entry, 0).to(tl.int64)
            # [BLOCK_N, DI]
            keys = load_rows(key_ptr, key * k_s + batch * k_b, there, DI)
            found = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
            found = product(query, tl.trans(keys), found, PRECISION, INTERPRETED)
            if GRADIENT:
                grad = tl.load(scores_ptr + place, mask=there, other=0.0)
                of_products = grad[None, :] * weight[:, None]
                if RELU:
                    of_products = tl.where(found > 0, of_products, 0.0)
                    found = tl.where(found < 0, 0.0, found)
                dw += tl.reduce(found * grad[None, :], 1, tl.standard._sum_combine)
                of_products = narrow(of_products, query.dtype, INTERPRETED)
                dq = product(of_products, keys, dq, PRECISION, INTERPRETED)
                dk = tl.full([BLOCK_N, DI], 0.0, tl.float32)
                dk = product(tl.trans(of_products), query, dk, PRECISION, INTERPRETED)
                row = key * batches + batch
                if IN_ORDER:
                    row = (own * topk + place) * (
                        (heads + BLOCK_M - 1) // BLOCK_M
                    ) + first // BLOCK_M
                pointers = dk_ptr + row[:, None] * DI + tl.arange(0, DI)[None, :]
                if IN_ORDER:
                    tl.store(pointers, dk, mask=there[:, None])
                else:
                    tl.atomic_add(pointers, dk, mask=there[:, None], sem="relaxed")
            else:
                if RELU:
                    # Not a maximum, which would take NaN away.
                    found = tl.where(found < 0, 0.0, found)
                total = tl.reduce(found * weight[:, None], 0, tl.standard._sum_combine)
                # The heads before, which this program has written.
                before = tl.load(scores_ptr + place, mask=(place < topk) & (first > 0), other=0.0)
                tl.store(scores_ptr + place, total + before, mask=place < topk)
        tl.debug_barrier()
        if GRADIENT:
            store_rows(dq_ptr, (own * heads + head) * DI, valid, dq, DI, INTERPRETED)
            tl.store(dw_ptr + own * heads + head, dw, mask=valid)
