"""Split-KV of few tokens: keys are split over programs, whose results are merged by LSE.

A tile of 64 rows takes all keys of a token, one block after the other; 32 tokens of 16 heads would
keep 32 of 132 multiprocessors busy. The number of splits depends on shapes alone, and results are
merged in the order of the keys: the same bits in every run, and in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.triton.common import LN_2, LOG2_E, interpreted, narrow
from absorbed_mla.kernels.triton_private import elementwise_max, sum_combine

# Programs that fill a Hopper GPU once, rows of a tile, and fewest keys of a split.
_PROGRAMS, _ROWS, _LEAST_KEYS = 128, 64, 128
# Values of all parts that a program of the merge holds, at least a row's.
_NUMBERS = 2048


def splits_for(queries: int, batch: int, heads: int, topk: int) -> int:
    """Parts, of equal length, of the keys of every token; a power of two.

    Args:
        queries: S_q, the tokens.
        batch: Only single entries are split: new tokens of a cache have no batch axis.
        heads: N.
        topk: Length of a selection.
    """
    splits, tiles = 1, max(queries, 1) * triton.cdiv(heads, _ROWS)
    while (
        batch == 1
        and 2 * splits * tiles <= _PROGRAMS
        and topk % (2 * splits) == 0
        and topk // (2 * splits) >= _LEAST_KEYS
    ):
        splits *= 2
    return splits


def merge_splits(parts: Tensor, part_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output [T, 1, N, C] in ``dtype`` and LSE [T, 1, N] fp32 of all keys.

    Args:
        parts: fp32 [T, splits, N, C], contiguous, splits a power of two; normalised over the keys
            of each split.
        part_lse: fp32 [T, splits, N], contiguous; -inf where there was no key.
        dtype: Of the output.
    """
    tokens, splits, heads, width = parts.shape
    out = parts.new_empty(tokens, 1, heads, width, dtype=dtype)
    lse = part_lse.new_empty(tokens, 1, heads)
    if out.numel():
        columns = triton.next_power_of_2(width)
        rows = max(_NUMBERS // (columns * splits), 1)
        _merge_kernel[(triton.cdiv(tokens * heads, rows),)](
            parts,
            part_lse,
            out,
            lse,
            tokens * heads,
            heads,
            WIDTH=width,
            COLUMNS=columns,
            ROWS=rows,
            SPLITS=splits,
            INTERPRETED=interpreted(),
            num_warps=4,
        )
    return out, lse


@triton.jit
def _merge_kernel(
    parts_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    heads,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Some heads of tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    first = row // heads * (SPLITS * heads) + row % heads
    column = tl.arange(0, COLUMNS)
    wide = inside[:, None] & (column < WIDTH)[None, :]
    # All parts are asked for before any is waited for. [ROWS, SPLITS], [ROWS, SPLITS, COLUMNS]
    source = first[:, None] + tl.arange(0, SPLITS)[None, :] * heads
    pointers = parts_ptr + source[:, :, None] * WIDTH + column[None, None, :]
    parts = tl.load(pointers, mask=wide[:, None, :], other=0.0)
    lse = tl.load(part_lse_ptr + source, mask=inside[:, None], other=float("-inf")) * LOG2_E
    top = tl.reduce(lse, 1, elementwise_max)
    # -inf - -inf would be NaN.
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.reduce(weight, 1, sum_combine)
    acc = tl.reduce(parts * weight[:, :, None], 1, sum_combine)
    blind = total == 0.0
    acc = acc / tl.where(blind, 1.0, total)[:, None]
    pointers = out_ptr + row[:, None] * WIDTH + column[None, :]
    tl.store(pointers, narrow(acc, out_ptr.dtype.element_ty, INTERPRETED), mask=wide)
    value = tl.where(blind, float("-inf"), (top + tl.log2(total)) * LN_2)
    tl.store(lse_ptr + row, value, mask=inside)
