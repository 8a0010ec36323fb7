"""The indexer's scores of chosen keys, and their gradient: a program has one query."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.dsa.index_scores import positive
from absorbed_mla.kernels.dsa.key_lists import key_lists
from absorbed_mla.kernels.dsa.scatter_add import add_in_order
from absorbed_mla.kernels.dsa.vector_atomics import add_quads, adds_quads, for_quads
from absorbed_mla.kernels.triton.common import (
    interpreted,
    load_rows,
    narrow,
    precision,
    product,
    rows_contiguous,
    store_rows,
)
from absorbed_mla.kernels.triton_private import sum_combine

_MOST_HEADS = 64
# Keys at a time, warps, and stages of the pipeline: of scores, their gradient, and that in order,
# where four warps would spill with the places of what keys get.
_SCORES, _GRADIENT, _IN_ORDER = (64, 4, 3), (64, 4, 3), (64, 8, 3)
# Of fp32, whose products are no tensor cores' and whose operands fill registers.
_FP32_SCORES, _FP32_GRADIENT = (32, 8, 1), (64, 8, 1)
# Bytes of a row of which more than one block of keys fits beside the rest.
_LONG_ROW = 256


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
    """Add the gradient of :func:`chosen_scores`, which describes what is not below.

    Args:
        gradient: Of the queries [Q, B, Hi, Di] and of the weights, fp32 [Q, B, Hi], which are
            written, last; between them that of the keys, fp32 [S_k, B, Di], which is added to. All
            contiguous.
        score_grad: fp32 [B, Q, P], 0 where there is no key.
        deterministic: Whether keys are added to in a fixed order; see scatter_add.py.
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
    keys, warps, stages = _IN_ORDER if in_order else _GRADIENT if gradient else _SCORES
    if query.dtype == torch.float32:
        keys, warps, stages = _FP32_GRADIENT if gradient else _FP32_SCORES
    elif query.shape[3] * query.element_size() > _LONG_ROW:
        stages = 1
    return {
        "DI": query.shape[3],
        "RELU": relu,
        "GRADIENT": gradient,
        "IN_ORDER": in_order,
        "QUADS": gradient and not in_order and adds_quads(query),
        "BLOCK_M": heads,
        "BLOCK_N": keys,
        "PRECISION": precision(query.dtype),
        "INTERPRETED": interpreted(),
        "num_warps": warps,
        "num_stages": stages,
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
    QUADS: tl.constexpr,
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
    chosen_ptr += own * topk
    query_ptr += token * q_s + batch * q_b
    key_ptr += batch * k_b
    for first in range(0, heads, BLOCK_M):
        head = first + tl.arange(0, BLOCK_M).to(tl.int64)
        valid = head < heads
        # [BLOCK_M, DI]
        query = load_rows(query_ptr, head * q_h, valid, DI)
        weight = tl.load(weights_ptr + own * heads + head, mask=valid, other=0.0)
        if GRADIENT:
            blocks = (heads + BLOCK_M - 1) // BLOCK_M
            part = own * topk * blocks + first // BLOCK_M
            dq, dw = _gradients(
                query, weight, key_ptr, k_s, chosen_ptr, scores_ptr, topk, dk_ptr, batch, batches,
                part, blocks, RELU, IN_ORDER, QUADS, BLOCK_N, PRECISION, INTERPRETED,
            )  # fmt: skip
            store_rows(dq_ptr, (own * heads + head) * DI, valid, dq, DI, INTERPRETED)
            tl.store(dw_ptr + own * heads + head, dw, mask=valid)
        else:
            _scores(
                query, weight, key_ptr, k_s, chosen_ptr, scores_ptr, topk, first > 0,
                RELU, BLOCK_N, PRECISION, INTERPRETED,
            )  # fmt: skip
            # The next heads are added to what this program has written.
            tl.debug_barrier()


@triton.jit
def _scores(
    query,
    weight,
    key_ptr,
    k_s,
    chosen_ptr,
    scores_ptr,
    topk,
    added,
    RELU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the scores of some heads, or add them."""
    entry = _entries(chosen_ptr, 0, topk, BLOCK_N)
    for start in range(0, topk, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        keys = _keys(key_ptr, entry, k_s, query.shape[1])
        # The next ones now: the pipeliner does not prefetch loads that depend on other loads.
        entry = _entries(chosen_ptr, start + BLOCK_N, topk, BLOCK_N)
        # Keys by heads: a warp has all heads of a key.
        found = tl.full([BLOCK_N, query.shape[0]], 0.0, tl.float32)
        found = product(keys, tl.trans(query), found, PRECISION, INTERPRETED)
        if RELU:
            found = positive(found)
        total = tl.reduce(found * weight[None, :], 1, sum_combine)
        if added:
            total += tl.load(scores_ptr + place, mask=place < topk, other=0.0)
        tl.store(scores_ptr + place, total, mask=place < topk)


@triton.jit
def _gradients(
    query,
    weight,
    key_ptr,
    k_s,
    chosen_ptr,
    grad_ptr,
    topk,
    dk_ptr,
    batch,
    batches,
    part,
    blocks,
    RELU: tl.constexpr,
    IN_ORDER: tl.constexpr,
    QUADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gradients of some heads' queries and weights; those of the keys are added or written."""
    DI: tl.constexpr = query.shape[1]
    dq = tl.full(query.shape, 0.0, tl.float32)
    dw = tl.full(weight.shape, 0.0, tl.float32)
    # Of half of the columns at a time if they are many: with all of dk registers would spill.
    HALF: tl.constexpr = DI // 2 if QUADS and DI > 64 else DI
    left, right = _halves(query, HALF, QUADS)
    entry = _entries(chosen_ptr, 0, topk, BLOCK_N)
    for start in range(0, topk, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        there = entry >= 0
        # [BLOCK_N, DI]
        keys = _keys(key_ptr, entry, k_s, DI)
        row = tl.where(there, entry, 0).to(tl.int64) * batches + batch
        if IN_ORDER:
            row = part + place * blocks
        grad = tl.load(grad_ptr + place, mask=place < topk, other=0.0)
        entry = _entries(chosen_ptr, start + BLOCK_N, topk, BLOCK_N)
        found = tl.full([query.shape[0], BLOCK_N], 0.0, tl.float32)
        found = product(query, tl.trans(keys), found, PRECISION, INTERPRETED)
        of_products = grad[None, :] * weight[:, None]
        if RELU:
            of_products = tl.where(found > 0, of_products, 0.0)
            found = positive(found)
        dw += tl.reduce(found * grad[None, :], 1, sum_combine)
        of_products = narrow(of_products, query.dtype, INTERPRETED)
        dq = product(of_products, keys, dq, PRECISION, INTERPRETED)
        # [BLOCK_N, BLOCK_M]
        of_products, row = tl.trans(of_products), row * DI
        _add_keys(dk_ptr, row, there, of_products, left, IN_ORDER, QUADS, PRECISION, INTERPRETED)
        if HALF < DI:
            row += HALF
            _add_keys(
                dk_ptr, row, there, of_products, right, IN_ORDER, QUADS, PRECISION, INTERPRETED
            )
    return dq, dw


@triton.jit
def _halves(query, HALF: tl.constexpr, QUADS: tl.constexpr):
    """Left and right columns of the operand that keys' gradients are products with."""
    left, right = query, query
    if query.shape[1] > HALF:
        both = tl.permute(tl.reshape(query, [query.shape[0], 2, HALF]), [0, 2, 1])
        left, right = tl.split(both)
    if QUADS:
        left, right = for_quads(left), for_quads(right)
    return left, right


@triton.jit
def _add_keys(
    dk_ptr,
    rows,
    there,
    of_products,
    query,
    IN_ORDER: tl.constexpr,
    QUADS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add some columns of what keys get from some heads to rows at these offsets, or write them."""
    dk = tl.full([of_products.shape[0], query.shape[1]], 0.0, tl.float32)
    dk = product(of_products, query, dk, PRECISION, INTERPRETED)
    if QUADS:
        add_quads(dk_ptr, rows, there, dk, INTERPRETED)
    else:
        pointers = dk_ptr + rows[:, None] + tl.arange(0, query.shape[1])[None, :]
        if IN_ORDER:
            tl.store(pointers, dk, mask=there[:, None])
        else:
            tl.atomic_add(pointers, dk, mask=there[:, None], sem="relaxed")


@triton.jit
def _entries(chosen_ptr, start, topk, BLOCK_N: tl.constexpr):
    """Some entries, -1 for none."""
    place = start + tl.arange(0, BLOCK_N)
    return tl.load(chosen_ptr + place, mask=place < topk, other=-1)


@triton.jit
def _keys(key_ptr, entry, k_s, DI: tl.constexpr):
    """Rows [BLOCK_N, DI] of the entries."""
    there = entry >= 0
    return load_rows(key_ptr, tl.where(there, entry, 0).to(tl.int64) * k_s, there, DI)
