"""Kernel of the product of rows with the weights of their experts, in parity mode.

Each expert's rows get the bits of ``matrix_product.py``. The host need not know how many they are:
there are as many programs as rows may need, however experts are chosen, and each finds its expert
from the ends of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.invariant import groups
from absorbed_mla.kernels.invariant.parts import sum_of_parts
from absorbed_mla.kernels.invariant.tiles import (
    FP32_TILES,
    GROUP,
    PART,
    SUMMANDS,
    Tile,
    part_length,
)
from absorbed_mla.kernels.invariant.tree import sum_by_tree
from absorbed_mla.kernels.scratch import not_filled
from absorbed_mla.kernels.triton.common import interpreted, narrow, precision
from absorbed_mla.kernels.triton_private import sum_combine

_GROUP = tl.constexpr(GROUP)
_place_in_groups = triton.jit(groups.place_in_groups)
# ``least_rows`` are those of an expert in the mean. The first tile that is enough programs is
# taken: with few rows the weights are all that takes time, and narrow tiles are more programs.
TILES = (
    Tile(128, 128, num_warps=8, num_stages=4, least_rows=65, enough=132),
    Tile(64, 128, num_warps=4, num_stages=4, least_rows=49),
    Tile(64, 64, num_warps=4, num_stages=5),
)
# Of leaves: up to four sums of a tile are in registers, of 32 each.
TREE_TILES = (Tile(128, 64, num_warps=8, num_stages=4, least_rows=65, enough=132), TILES[-1])


def grouped_product(
    x: Tensor,
    weights: Tensor,
    ends: Tensor,
    tokens: Tensor | None = None,
    *,
    tile: Tile | None = None,
    part: int | None = None,
    leaves: int | None = None,
) -> Tensor:
    """``rows[a:b] @ weights[e].T`` for the rows a to b of each expert e.

    Args:
        x: The rows [R, K], contiguous, bf16, fp16 or fp32, those of an expert together; or what
            they are taken from.
        weights: [E, N, K], contiguous, in the dtype of ``x``.
        ends: Int32 [E], the row behind the last one of each expert.
        tokens: Int64 [R], where in ``x`` each row is; None: there are the rows.
        tile: Instead of the one that is chosen; no bit depends on it.
        part: Summands of a part; None: as ``tiles.py`` has it by the number of columns.
        leaves: Instead, the number of equal parts, which are added by the tree of ``tree.py``: 1,
            2, 4 or 8, a divisor of K.

    Returns:
        [R, N]; rows behind the last end are undefined.
    """
    rows, (experts, columns, summands) = len(x if tokens is None else tokens), weights.shape
    with not_filled():
        out = x.new_empty(rows, columns)
    if not out.numel():
        return out
    if leaves is None:
        part, leaves = part or part_length(summands, columns, PART), 1
    else:
        assert leaves in (1, 2, 4, 8) and summands % leaves == 0
        part = summands // leaves
    tile = tile or tile_for(rows, experts, columns, x.dtype, leaves)
    below = row_tiles(rows, experts, tile)
    with torch.cuda.device_of(out):
        _grouped_kernel[(below * triton.cdiv(columns, tile.columns),)](
            x,
            tokens,
            weights,
            ends,
            out,
            below,
            experts,
            columns,
            summands,
            part,
            LEAVES=leaves,
            EXPERTS=triton.next_power_of_2(experts),
            BLOCK_R=tile.rows,
            BLOCK_C=tile.columns,
            BLOCK_K=SUMMANDS[x.dtype],
            TAKEN=tokens is not None,
            PRECISION=precision(x.dtype),
            INTERPRETED=interpreted(),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out


def row_tiles(rows: int, experts: int, tile: Tile) -> int:
    """Tiles of rows that all experts together may have, however rows are distributed."""
    return rows // tile.rows + min(rows, experts)


def tile_for(rows: int, experts: int, columns: int, dtype: torch.dtype, leaves: int = 1) -> Tile:
    """The tile of a product.

    Args:
        rows: Of all experts together.
        experts: That they are of.
        columns: Of the product.
        dtype: Of the operands, one of ``SUMMANDS``.
        leaves: Of an element.
    """
    if dtype == torch.float32:
        return FP32_TILES[0]
    tiles = TILES if leaves == 1 else TREE_TILES
    for tile in tiles:
        programs = max(experts, rows // tile.rows) * triton.cdiv(columns, tile.columns)
        if rows >= tile.least_rows * experts and programs >= tile.enough:
            return tile
    return tiles[-1]


@triton.jit(do_not_specialize=["row_tiles"], do_not_specialize_on_alignment=["tokens_ptr"])
def _grouped_kernel(
    x_ptr,
    tokens_ptr,
    weights_ptr,
    ends_ptr,
    out_ptr,
    row_tiles,
    experts,
    columns,
    summands,
    part_length,
    LEAVES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TAKEN: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Tiles of rows of one expert follow each other, and find its columns in the cache.
    column_tiles = (columns + BLOCK_C - 1) // BLOCK_C
    row_tile, column_tile = _place_in_groups(tl.program_id(0), row_tiles, column_tiles, _GROUP)
    expert, number = _expert_of(row_tile, ends_ptr, experts, EXPERTS, BLOCK_R)
    if expert >= experts:
        return
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    row = begin + number * BLOCK_R + tl.arange(0, BLOCK_R)
    row_there = row < tl.load(ends_ptr + expert)
    of_rows = row.to(tl.int64)
    if TAKEN:
        of_rows = tl.load(tokens_ptr + row, mask=row_there, other=0)
    row_there = row_there[:, None]
    # Offsets within a tile fit 32 bits.
    column, k = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    first_column = column_tile * BLOCK_C
    column_there = (first_column + column < columns)[None, :]
    left = x_ptr + of_rows[:, None] * summands + k[None, :]
    right = weights_ptr + (expert.to(tl.int64) * columns + first_column) * summands
    right = right + k[:, None] + column[None, :] * summands
    if LEAVES == 1:
        total = sum_of_parts(
            left,
            right,
            row_there,
            column_there,
            0,
            summands,
            part_length,
            summands,
            1,
            1,
            BLOCK_R,
            BLOCK_C,
            BLOCK_K,
            PRECISION,
            INTERPRETED,
        )
    else:
        total = sum_by_tree(
            left,
            right,
            row_there,
            column_there,
            0,
            part_length,
            1,
            1,
            LEAVES,
            1,
            LEAVES,
            BLOCK_R,
            BLOCK_C,
            BLOCK_K,
            PRECISION,
            INTERPRETED,
        )
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * columns + (first_column + column)[None, :],
        narrow(total, out_ptr.dtype.element_ty, INTERPRETED),
        mask=row_there & column_there,
    )


@triton.jit
def _expert_of(row_tile, ends_ptr, experts, EXPERTS: tl.constexpr, BLOCK_R: tl.constexpr):
    """The expert of a tile of rows, among the tiles of all, and the tile's number in it.

    An expert that there is not, if there is no such tile.
    """
    expert = tl.arange(0, EXPERTS)
    there = expert < experts
    begin = tl.load(ends_ptr + expert - 1, mask=there & (expert > 0), other=0)
    tiles = (tl.load(ends_ptr + expert, mask=there, other=0) - begin + BLOCK_R - 1) // BLOCK_R
    tiles = tl.where(there, tiles, 0)
    past = tl.associative_scan(tiles, 0, sum_combine)
    # Experts all of whose tiles come before this one.
    earlier = there & (past <= row_tile)
    count = tl.reduce(earlier.to(tl.int32), 0, sum_combine)
    first = tl.reduce(tl.where(earlier, tiles, 0), 0, sum_combine)
    return count, row_tile - first
