"""Skinny grouped GEMM: few rows with the weights of their experts, as fast as these are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.triton.common import interpreted, narrow, precision, product

# Rows of an expert in the mean. With more the tensor cores are kept busy: PyTorch's is faster.
_MOST_ROWS = 64


@dataclass(frozen=True)
class _GemmTile:
    """Rows, columns and summands of a step of a program; bf16, of fp32 half of the summands."""

    rows: int
    columns: int = 64
    summands: int = 128
    stages: int = 5
    warps: int = 4


# The fastest of ten shapes at DeepSeek-V3's widths and 8 to 1,024 rows, on an H100.
_TILES = (
    _GemmTile(16),
    _GemmTile(32),
    _GemmTile(64),
    _GemmTile(128, columns=128, stages=3, warps=8),
)


def is_few(rows: int, experts: int) -> bool:
    """Whether :func:`few_rows_product` is the faster one for that many rows."""
    return rows <= _MOST_ROWS * experts


def few_rows_product(
    x: Tensor, weights: Tensor, ends: Tensor, tokens: Tensor | None = None
) -> Tensor:
    """``rows[a:b] @ weights[e].T`` for the rows a to b of each expert e; deterministic.

    Args:
        x: The rows [R, K], contiguous, those of an expert together; or what they are taken from.
        weights: [E, N, K], contiguous.
        ends: Int32 [E], the row behind the last one of each expert.
        tokens: Int64 [R], where in ``x`` each row is; None: there are the rows.

    Returns:
        [R, N]; rows behind the last end are undefined.
    """
    count, (experts, columns, summands) = len(x if tokens is None else tokens), weights.shape
    out = x.new_empty(count, columns)
    # For twice the mean, since experts are not chosen equally: with more rows than the tile has, an
    # expert's weights are read again.
    tile = next((t for t in _TILES if t.rows * experts >= 2 * count), _TILES[-1])
    depth = tile.summands * 2 // x.element_size()
    with torch.cuda.device_of(out):
        _few_rows_kernel[(triton.cdiv(columns, tile.columns), experts)](
            x,
            tokens,
            weights,
            ends,
            out,
            columns,
            summands,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            SUMMANDS=depth,
            EVEN=columns % tile.columns == 0 and summands % depth == 0,
            TAKEN=tokens is not None,
            PRECISION=precision(x.dtype),
            INTERPRETED=interpreted(),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


@triton.jit
def _few_rows_kernel(
    x_ptr,
    tokens_ptr,
    weights_ptr,
    ends_ptr,
    out_ptr,
    columns,
    summands,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMMANDS: tl.constexpr,
    EVEN: tl.constexpr,
    TAKEN: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    expert = tl.program_id(1)
    end = tl.load(ends_ptr + expert)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    of_columns = expert.to(tl.int64) * columns * summands + column.to(tl.int64) * summands
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        there = row < end
        of_rows = row.to(tl.int64)
        if TAKEN:
            of_rows = tl.load(tokens_ptr + row, mask=there, other=0)
        of_rows *= summands
        total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
        for start in range(0, summands, SUMMANDS):
            summand = start + tl.arange(0, SUMMANDS)
            left_mask, right_mask = there[:, None], None
            if not EVEN:
                left_mask &= (summand < summands)[None, :]
                right_mask = inside[None, :] & (summand < summands)[:, None]
            left = tl.load(x_ptr + of_rows[:, None] + summand[None, :], mask=left_mask, other=0.0)
            pointers = weights_ptr + of_columns[None, :] + summand[:, None]
            if EVEN:
                right = tl.load(pointers)
            else:
                right = tl.load(pointers, mask=right_mask, other=0.0)
            total = product(left, right, total, PRECISION, INTERPRETED)
        value = narrow(total, out_ptr.dtype.element_ty, INTERPRETED)
        pointers = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(pointers, value, mask=there[:, None] & inside[None, :])
