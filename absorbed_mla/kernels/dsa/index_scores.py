"""The indexer's scores of a chunk of queries, summed over heads as they are computed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.e4m3 import to_e4m3
from absorbed_mla.kernels.triton.common import (
    interpreted,
    load_rows,
    precision,
    product,
    row_max,
    rows_contiguous,
)

# Queries and keys of a tile, warps, and stages of the pipeline; of short and of long rows. With two
# programs on a multiprocessor one has products while the other weights its own and adds them up;
# long rows leave no room for a second.
_TILE, _LONG_TILE = (64, 128, 4, 3), (128, 128, 8, 2)
# Bytes of a short row, at most.
_SHORT_ROW = 256


def index_scores(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    queries: slice,
    key_start: int,
    num_keys: int,
    offset: int | None,
    relu: bool,
) -> Tensor:
    """Scores ``sum_j weights[t, j] * ReLU(query[t, j] . key[s])`` of some queries and keys.

    Products have the operands' precision and fp32 sums. With ``relu`` NaN stays NaN.

    Args:
        query: [S_q, B, Hi, Di], bf16, fp16 or fp32; Di a power of two, at least 16. In e4m3, with
            Di at least 32, keys are rounded to it, too.
        key: [S_k, B, Di].
        weights: fp32 [S_q, B, Hi].
        queries: Which of them, from ``start`` to ``stop``.
        key_start: First key.
        num_keys: How many follow, the first included.
        offset: Query i of these sees keys 0 .. i + offset; None for all.
        relu: Whether products pass a ReLU.

    Returns:
        fp32 [B, Q, num_keys]; where a query does not see a key, anything.
    """
    query, key = rows_contiguous(query, key)
    weights = weights.float()
    _, batch, heads, width = query.shape
    count = queries.stop - queries.start
    # Padded rows begin at multiples of 16 bytes, so that stores are wide.
    out = torch.empty(batch, count, -(-num_keys // 4) * 4, device=query.device)[..., :num_keys]
    short = width * query.element_size() <= _SHORT_ROW
    rows, columns, warps, stages = _TILE if short else _LONG_TILE
    grid = (triton.cdiv(count, rows), triton.cdiv(num_keys, columns), batch)
    if not out.numel():
        return out
    query, weights = query[queries], weights[queries]
    _scores_kernel[grid](
        query,
        key[key_start:],
        weights,
        out,
        *query.stride()[:3],
        *key.stride()[:2],
        *weights.stride(),
        *out.stride()[:2],
        count,
        num_keys,
        num_keys if offset is None else offset,
        heads,
        DI=width,
        RELU=relu,
        FP8=query.dtype == torch.float8_e4m3fn,
        BLOCK_M=rows,
        BLOCK_N=columns,
        PRECISION=precision(query.dtype),
        INTERPRETED=interpreted(),
        num_warps=warps,
        num_stages=stages,
    )
    return out


@triton.jit
def _scores_kernel(
    query_ptr,
    key_ptr,
    weights_ptr,
    out_ptr,
    q_s,
    q_b,
    q_h,
    k_s,
    k_b,
    w_s,
    w_b,
    w_h,
    out_b,
    out_s,
    queries,
    num_keys,
    offset,
    heads,
    DI: tl.constexpr,
    RELU: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Some queries and keys of an entry of the batch; nothing where no query sees a key."""
    batch = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_key = tl.program_id(1) * BLOCK_N
    key = first_key + tl.arange(0, BLOCK_N)
    last_query = tl.minimum((tl.program_id(0) + 1) * BLOCK_M, queries) - 1
    if first_key <= last_query + offset:
        valid, there = token < queries, key < num_keys
        # [BLOCK_N, DI]
        keys = load_rows(key_ptr, batch * k_b + key.to(tl.int64) * k_s, there, DI)
        if FP8:
            keys, key_scales = fp8_keys(keys, INTERPRETED)
        rows = batch * q_b + token * q_s
        row_weights = weights_ptr + batch * w_b + token * w_s
        total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
        for number in range(heads):
            head = tl.full([], number, tl.int64)  # heads may be a whole sequence apart
            # [BLOCK_M, DI]
            query = load_rows(query_ptr + head * q_h, rows, valid, DI)
            weight = tl.load(row_weights + head * w_h, mask=valid, other=0.0)
            found = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
            found = product(query, tl.trans(keys), found, PRECISION, INTERPRETED)
            if RELU:
                found = positive(found)
            total += weight[:, None] * found
        if FP8:
            total *= key_scales[None, :]
        pointers = out_ptr + batch * out_b + token[:, None] * out_s + key[None, :]
        tl.store(pointers, total, mask=valid[:, None] & there[None, :])


@triton.jit
def positive(values):
    """The ReLU of products: NaN stays NaN, which the interpreter does not test.

    One instruction for an element, and to compare and select are two.
    """
    return tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def fp8_keys(keys, INTERPRETED: tl.constexpr):
    """Loaded rows [N, D] as e4m3, and the power of two [N] that each was divided by.

    The same bits as ``dsa/fp8_rows.py``: see there.
    """
    wide = keys.to(tl.float32)
    largest = tl.maximum(row_max(tl.abs(wide)), 1e-4)
    bits = (largest.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000
    bits -= 8 << 23
    # The reciprocal of a power of two has the negated exponent.
    reciprocal = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    scales = bits.to(tl.float32, bitcast=True)
    return to_e4m3(wide * reciprocal[:, None], INTERPRETED), scales
