"""Pre- and postprocessing of the multi-head backward, for every query.

Before: the numbers that its products start from. With scores s = q . k, a query's log-sum-exp L
and its delta, P = exp(scale * (s - L / scale)) and dS = P * (dP - delta), so that s starts from
-L / scale and dP from -delta, and nothing is left to subtract. After: dQ in the order of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch

_ROWS = 64
# Of a tensor that a program has at a time, in rows of more than 128.
_NUMBERS = 8192
# Starts of rows are 16 bytes apart, or tensor maps could not describe them.
_ALIGNED = 4


def starts(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Where scores and dP start from, -inf and 0 for an LSE of -inf; the gradient of a sink.

    Args:
        grad_out: [S_q, B, N, V].
        grad_lse: [S_q, B, N] or None.
        out: [S_q, B, N, V]; V is a power of two.
        lse: [S_q, B, N].
        scale: Of the scores.
        sink: [N], whose part in the LSE has a gradient; or None.

    Returns:
        Twice fp32 [B * N, S_q], in memory of rows that a tensor map can describe; fp32 [N] or None.
    """
    queries, batch, heads, width = out.shape
    grad_out, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_out, out))
    stride = -(-queries // _ALIGNED) * _ALIGNED
    both = torch.empty(2, batch * heads, stride, dtype=torch.float32, device=out.device)
    rows = min(_ROWS, max(_NUMBERS // width, 1))
    grid = -(-queries // rows), batch * heads
    sums = None if sink is None else both.new_empty(heads, batch, grid[0])
    grad_lse_strides = (0, 0, 0) if grad_lse is None else grad_lse.stride()
    launch(
        _starts_kernel,
        grid,
        grad_out,
        lse if grad_lse is None else grad_lse,
        out,
        lse,
        *both,
        sink,
        sums,
        queries,
        heads,
        stride,
        *grad_out.stride()[:3],
        *grad_lse_strides,
        *out.stride()[:3],
        *lse.stride(),
        1 / scale,
        V=width,
        ROWS=rows,
        WITH_LSE=grad_lse is not None,
    )
    score, dp = both[..., :queries]
    return score, dp, None if sums is None else sums.sum((1, 2))


@triton.jit
def _starts_kernel(
    grad_out,
    grad_lse,
    out,
    lse,
    score,
    dp,
    sink,
    sums,
    queries,
    heads,
    stride,
    grad_out_stride_s,
    grad_out_stride_b,
    grad_out_stride_n,
    grad_lse_stride_s,
    grad_lse_stride_b,
    grad_lse_stride_n,
    out_stride_s,
    out_stride_b,
    out_stride_n,
    lse_stride_s,
    lse_stride_b,
    lse_stride_n,
    inverse_scale,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    group = tl.program_id(1).to(tl.int64)
    batch, head = group // heads, group % heads
    # [ROWS]
    query = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = query < queries
    # [ROWS, V]
    column = tl.arange(0, V)[None, :]
    grad_out += query * grad_out_stride_s + batch * grad_out_stride_b + head * grad_out_stride_n
    out += query * out_stride_s + batch * out_stride_b + head * out_stride_n
    left = tl.load(grad_out[:, None] + column, mask=valid[:, None], other=0.0).to(tl.float32)
    right = tl.load(out[:, None] + column, mask=valid[:, None], other=0.0).to(tl.float32)
    if sink is not None:  # A query that sees no key has an LSE, too, and may have any gradient.
        left = tl.where(right == 0, 0.0, left)
    delta = tl.sum(left * right, axis=1)
    if WITH_LSE:
        grad_lse += query * grad_lse_stride_s + batch * grad_lse_stride_b + head * grad_lse_stride_n
        delta -= tl.load(grad_lse, mask=valid, other=0.0).to(tl.float32)
    lse += query * lse_stride_s + batch * lse_stride_b + head * lse_stride_n
    least = tl.load(lse, mask=valid, other=float("-inf")).to(tl.float32)
    seen = least != float("-inf")
    tl.store(
        score + group * stride + query,
        tl.where(seen, -least * inverse_scale, float("-inf")),
        mask=valid,
    )
    tl.store(dp + group * stride + query, tl.where(seen, -delta, 0.0), mask=valid)
    if sink is not None:
        share = tl.exp(tl.load(sink + head).to(tl.float32) - least)
        place = (head * (tl.num_programs(1) // heads) + batch) * tl.num_programs(0)
        tl.store(sums + place + tl.program_id(0), tl.sum(tl.where(seen, -share * delta, 0.0)))


def query_gradient(fragments: Tensor, like: Tensor, content: int, scale: float) -> Tensor:
    """What the kernel added up, times the scale, as a tensor.

    Args:
        fragments: fp32 [B * N, blocks, 64 * width], see multi_head_backward_kernel.py.
        like: The queries, [S_q, B, N, width].
        content: Columns of the accumulator that has the first ones; another has the rest.
        scale: Of the scores.
    """
    queries, batch, heads, width = like.shape
    result = torch.empty_like(like, memory_format=torch.contiguous_format)
    launch(
        _query_gradient_kernel,
        fragments.shape[:2][::-1],
        fragments,
        result,
        queries,
        batch,
        heads,
        scale,
        WIDTH=width,
        CONTENT=content,
        ROWS=_ROWS,
        COLUMNS=32,
    )
    return result


@triton.jit
def _query_gradient_kernel(
    fragments,
    result,
    queries,
    batches,
    heads,
    scale,
    WIDTH: tl.constexpr,
    CONTENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    fragments += (group * tl.num_programs(0) + block) * (ROWS * WIDTH)
    row = tl.arange(0, ROWS)
    query = block * ROWS + row
    target = result + ((query * batches + group // heads) * heads + group % heads) * WIDTH
    # Where row and column are in the memory of fragments.
    of_row = row // 16 * 128 + row % 8 * 16 + row % 16 // 8 * 2
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        # Of the accumulator that has these columns: its first one, and how many it has.
        start = 0 if first < CONTENT else CONTENT
        half = (CONTENT if first < CONTENT else WIDTH - CONTENT) // 2
        group = (column - start) % half // 8 * 2 + (column - start) // half
        of_column = start * ROWS + group * (ROWS * 8) + column % 8 // 2 * 4 + column % 2
        values = tl.load(fragments + of_row[:, None] + of_column[None, :])
        tl.store(
            target[:, None] + column[None, :],
            (values * scale).to(result.dtype.element_ty),
            mask=query[:, None] < queries,
        )
