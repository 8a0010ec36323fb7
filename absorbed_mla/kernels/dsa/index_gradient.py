"""Gradients of the indexer's scores of a run of keys.

One launch has tiles of queries, one head each, and goes through the keys; another has tiles of keys
and goes through queries and heads. Both compute the products again; nothing is added by atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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

_BLOCK = 64


def add_visible_gradient(
    gradient: tuple[Tensor, Tensor, Tensor],
    score_grad: Tensor,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    offset: int | None,
    relu: bool,
) -> None:
    """Add the gradient of ``index_scores`` for some queries and a run of keys.

    Args:
        gradient: Of the queries [Q, B, Hi, Di], then the keys, fp32 [K, B, Di], then the weights,
            fp32 [Q, B, Hi], contiguous; that of the keys is added to, the others are written.
        score_grad: fp32 [B, Q, K], 0 where a query does not see a key.
        query: [Q, B, Hi, Di].
        key: [K, B, Di].
        weights: fp32 [Q, B, Hi].
        offset: Query i sees keys 0 .. i + offset; None for all.
        relu: Whether products pass a ReLU.
    """
    query, key = rows_contiguous(query, key)
    weights, score_grad = weights.float().contiguous(), score_grad.contiguous()
    queries, batch, heads, width = query.shape
    keys = len(key)
    if not score_grad.numel():
        return
    tiles = (triton.cdiv(queries, _BLOCK) * heads, batch), (triton.cdiv(keys, _BLOCK), batch)
    for grid, of_keys in zip(tiles, (False, True)):
        _gradient_kernel[grid](
            query,
            key,
            weights,
            score_grad,
            *gradient,
            *query.stride()[:3],
            *key.stride()[:2],
            queries,
            keys,
            heads,
            keys if offset is None else offset,
            DI=width,
            RELU=relu,
            OF_KEYS=of_keys,
            BLOCK=_BLOCK,
            PRECISION=precision(query.dtype),
            INTERPRETED=interpreted(),
            num_warps=4,
            num_stages=2,
        )


@triton.jit
def _products(query, keys, weight, grad, RELU: tl.constexpr, HOW: tl.constexpr):
    """Products [BLOCK, BLOCK] after the ReLU, and their gradient."""
    found = tl.full([query.shape[0], keys.shape[0]], 0.0, tl.float32)
    found = product(query, tl.trans(keys), found, HOW[0], HOW[1])
    of_products = grad * weight[:, None]
    if RELU:
        of_products = tl.where(found > 0, of_products, 0.0)
        found = tl.where(found < 0, 0.0, found)
    return found, narrow(of_products, query.dtype, HOW[1])


@triton.jit
def _gradient_kernel(
    query_ptr,
    key_ptr,
    weights_ptr,
    grad_ptr,
    dq_ptr,
    dk_ptr,
    dw_ptr,
    q_s,
    q_b,
    q_h,
    k_s,
    k_b,
    queries,
    num_keys,
    heads,
    offset,
    DI: tl.constexpr,
    RELU: tl.constexpr,
    OF_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gradients of a tile of queries and a head, or of a tile of keys."""
    batch, batches = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    grad_ptr += batch * queries * num_keys
    column = tl.arange(0, BLOCK)
    if OF_KEYS:
        first_key = tl.program_id(0) * BLOCK
        key = (first_key + column).to(tl.int64)
        there = key < num_keys
        keys = load_rows(key_ptr, key * k_s + batch * k_b, there, DI)
        dk = tl.full([BLOCK, DI], 0.0, tl.float32)
        for first in range(tl.maximum(first_key - offset, 0) // BLOCK * BLOCK, queries, BLOCK):
            token = (first + column).to(tl.int64)
            valid = token < queries
            pointers = grad_ptr + token[:, None] * num_keys + key[None, :]
            grad = tl.load(pointers, mask=valid[:, None] & there[None, :], other=0.0)
            for number in range(heads):
                head = tl.full([], number, tl.int64)  # heads may be a whole sequence apart
                rows = token * q_s + batch * q_b
                query = load_rows(query_ptr + head * q_h, rows, valid, DI)
                row = (token * batches + batch) * heads + head
                weight = tl.load(weights_ptr + row, mask=valid, other=0.0)
                _, of_products = _products(
                    query, keys, weight, grad, RELU, (PRECISION, INTERPRETED)
                )
                dk = product(tl.trans(of_products), query, dk, PRECISION, INTERPRETED)
        pointers = dk_ptr + (key * batches + batch)[:, None] * DI + tl.arange(0, DI)[None, :]
        before = tl.load(pointers, mask=there[:, None], other=0.0)
        tl.store(pointers, before + dk, mask=there[:, None])
    else:
        head = (tl.program_id(0) % heads).to(tl.int64)
        token = (tl.program_id(0) // heads * BLOCK + column).to(tl.int64)
        valid = token < queries
        query = load_rows(query_ptr, token * q_s + batch * q_b + head * q_h, valid, DI)
        row = (token * batches + batch) * heads + head
        weight = tl.load(weights_ptr + row, mask=valid, other=0.0)
        dq = tl.full([BLOCK, DI], 0.0, tl.float32)
        dw = tl.full([BLOCK], 0.0, tl.float32)
        last = tl.minimum((tl.program_id(0) // heads + 1) * BLOCK, queries) - 1
        for first in range(0, tl.minimum(num_keys, tl.maximum(last + offset + 1, 0)), BLOCK):
            key = (first + column).to(tl.int64)
            there = key < num_keys
            keys = load_rows(key_ptr, key * k_s + batch * k_b, there, DI)
            pointers = grad_ptr + token[:, None] * num_keys + key[None, :]
            grad = tl.load(pointers, mask=valid[:, None] & there[None, :], other=0.0)
            found, of_products = _products(
                query, keys, weight, grad, RELU, (PRECISION, INTERPRETED)
            )
            dw += tl.reduce(found * grad, 1, sum_combine)
            dq = product(of_products, keys, dq, PRECISION, INTERPRETED)
        store_rows(dq_ptr, row * DI, valid, dq, DI, INTERPRETED)
        tl.store(dw_ptr + row, dw, mask=valid)
