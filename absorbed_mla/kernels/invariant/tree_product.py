"""Matrix product whose sums are those of every tensor-parallel size: a binary tree over leaves.

A program sums a subtree of a tile's leaves. Where one subtree for each tile would leave a part of
the device idle there are several, which are stored in fp32 and added by a second kernel. On Hopper
products of many tiles are hopper/tree_product_kernel.py's. All have the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.invariant import groups
from absorbed_mla.kernels.invariant.matrix_product import has_wide_tile, matrix_product
from absorbed_mla.kernels.invariant.tiles import FP32_TILES, GROUP, MOST_LEAVES, SUMMANDS, Tile
from absorbed_mla.kernels.invariant.tree import sum_by_tree
from absorbed_mla.kernels.scratch import not_filled
from absorbed_mla.kernels.triton.common import interpreted, narrow, precision

_GROUP = tl.constexpr(GROUP)
_place_in_groups = triton.jit(groups.place_in_groups)
# In registers up to four sums of a tile are kept, of 32 numbers of a thread each. There are as many
# subtrees of a tile as make ``enough`` programs.
TILES = (
    Tile(128, 64, num_warps=8, num_stages=4, least_rows=65, enough=264),
    Tile(64, 64, num_warps=4, num_stages=5, enough=200),
)
# On Hopper, for products of ``enough`` tiles.
WIDE_TILE = Tile(128, 128, num_warps=12, num_stages=4, enough=96)
# Elements of a program that adds subtrees.
_ADDED = 512
# Bytes of subtrees that may wait for each other: rows are computed so many at a time.
_MOST_WAITING = 2**28


def tree_product(
    left: Tensor,
    right: Tensor,
    leaves: int,
    runs: int = 1,
    dtype: torch.dtype | None = None,
    *,
    tile: Tile | None = None,
    subtrees: int | None = None,
) -> Tensor:
    """Multiply two matrices, with the sum of each leaf in fp32, added by a tree over neighbours.

    Args:
        left: [rows, summands], bf16, fp16 or fp32, any strides.
        right: [summands, columns], in the dtype of ``left``, any strides.
        leaves: A power of 2 that divides the summands.
        runs: Leaf i has the summands of place i // runs of run i % runs: with 2 a part's gates and
            up-projections, half of the summands apart, become neighbours.
        dtype: Of the result; None: that of ``left``.
        tile: Instead of the one that is chosen; no bit depends on it. A wide one takes what
            ``can_multiply_by_tree`` of hopper/product.py says.
        subtrees: Likewise, of a tile.

    Returns:
        [rows, columns].
    """
    (rows, summands), columns = left.shape, right.shape[1]
    leaf = summands // leaves
    assert leaf * leaves == summands and not leaves & (leaves - 1), "equal leaves of a tree"
    if leaves == 1:
        return matrix_product(left, right, dtype=dtype, part=max(leaf, 1))
    with not_filled():
        result = torch.empty(rows, columns, dtype=dtype or left.dtype, device=left.device)
    if not result.numel():
        return result
    if tile is None and subtrees is None and _is_wide_chosen(left, right, result, leaf):
        tile = WIDE_TILE
    if tile is not None and tile.is_wide:
        from absorbed_mla.kernels.hopper import product

        with torch.cuda.device_of(left):
            product.multiply_by_tree(left, right, result, leaves, runs, tile.num_stages)
        return result
    tile = tile or _tile_for(rows, left.dtype)
    subtrees = subtrees or _subtrees(tile, tile.count(rows, columns), leaves)
    most = max(_MOST_WAITING // (subtrees * columns * 4) // tile.rows, 1) * tile.rows
    at_once = most if subtrees > 1 else rows
    for some, target in zip(left.split(at_once), result.split(at_once)):
        _multiply(some, right, target, leaves, runs, tile, subtrees)
    return result


def _is_wide_chosen(left: Tensor, right: Tensor, result: Tensor, leaf: int) -> bool:
    """Whether ``WIDE_TILE`` is possible and fills the device."""
    if WIDE_TILE.count(*result.shape) < WIDE_TILE.enough or not has_wide_tile(left.device):
        return False
    # Imported here, because Triton's versions for other devices need not have Gluon.
    from absorbed_mla.kernels.hopper.product import can_multiply_by_tree

    return can_multiply_by_tree(left, right, result, leaf)


def _tile_for(rows: int, dtype: torch.dtype) -> Tile:
    tiles = FP32_TILES if dtype == torch.float32 else TILES
    return next((tile for tile in tiles if rows >= tile.least_rows), tiles[-1])


def _subtrees(tile: Tile, tiles: int, leaves: int) -> int:
    """Of each tile, so that there are enough programs; a power of 2."""
    subtrees = max(leaves // MOST_LEAVES, 1)
    while subtrees < leaves and subtrees * tiles < tile.enough:
        subtrees *= 2
    return subtrees


def _multiply(
    left: Tensor, right: Tensor, result: Tensor, leaves: int, runs: int, tile: Tile, subtrees: int
) -> None:
    (rows, summands), columns = left.shape, right.shape[1]
    sums = result
    if subtrees > 1:
        with not_filled():
            sums = left.new_empty((subtrees, rows, columns), dtype=torch.float32)
    tiles = tile.count(rows, columns)
    # As in matrix_product.py: what Triton is told of the number of rows.
    unit = 16 if left.stride(0) == 1 and rows % 16 == 0 else 1
    leaf_unit = 8 if summands % (8 * leaves) == 0 else 1
    with torch.cuda.device_of(left):
        _tree_product_kernel[(tiles * subtrees,)](
            left,
            right,
            sums,
            rows // unit,
            columns,
            summands // leaves // leaf_unit,
            tiles,
            *left.stride(),
            *right.stride(),
            UNIT=unit,
            LEAF_UNIT=leaf_unit,
            LEAVES=leaves // subtrees,
            RUNS=runs,
            RUN=leaves // runs,
            BLOCK_R=tile.rows,
            BLOCK_C=tile.columns,
            BLOCK_K=SUMMANDS[left.dtype],
            PRECISION=precision(left.dtype),
            INTERPRETED=interpreted(),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if subtrees > 1:
            _add_kernel[(triton.cdiv(result.numel(), _ADDED),)](
                sums,
                result,
                result.numel(),
                SUBTREES=subtrees,
                BLOCK=_ADDED,
                INTERPRETED=interpreted(),
            )


@triton.jit(do_not_specialize=["row_units", "tiles"])
def _tree_product_kernel(
    left_ptr,
    right_ptr,
    result_ptr,
    row_units,
    columns,
    leaf_units,
    tiles,
    stride_l_r,
    stride_l_k,
    stride_r_k,
    stride_r_c,
    UNIT: tl.constexpr,
    LEAF_UNIT: tl.constexpr,
    LEAVES: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    rows = row_units * UNIT
    subtree, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row_tiles, column_tiles = (rows + BLOCK_R - 1) // BLOCK_R, (columns + BLOCK_C - 1) // BLOCK_C
    row_tile, column_tile = _place_in_groups(tile, row_tiles, column_tiles, _GROUP)
    first_row, first_column = row_tile * BLOCK_R, column_tile * BLOCK_C
    # [BLOCK_R], [BLOCK_C]; offsets within a tile fit 32 bits, those of tiles need not.
    row, column = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    left = left_ptr + first_row.to(tl.int64) * stride_l_r
    left = left + row[:, None] * stride_l_r + k[None, :] * stride_l_k
    right = right_ptr + first_column.to(tl.int64) * stride_r_c
    right = right + k[:, None] * stride_r_k + column[None, :] * stride_r_c
    row_there = (first_row + row < rows)[:, None]
    column_there = (first_column + column < columns)[None, :]
    total = sum_by_tree(
        left,
        right,
        row_there,
        column_there,
        subtree * LEAVES,
        leaf_units * LEAF_UNIT,
        stride_l_k,
        stride_r_k,
        LEAVES,
        RUNS,
        RUN,
        BLOCK_R,
        BLOCK_C,
        BLOCK_K,
        PRECISION,
        INTERPRETED,
    )
    row = tl.cast(subtree, tl.int64) * rows + first_row + row
    tl.store(
        result_ptr + row[:, None] * columns + (first_column + column)[None, :],
        narrow(total, result_ptr.dtype.element_ty, INTERPRETED),
        mask=row_there & column_there,
    )


@triton.jit
def _subtree(sums, count, inside, FIRST: tl.constexpr, NUMBER: tl.constexpr):
    """The sum of so many subtrees of an element, by the tree over them."""
    if NUMBER == 1:
        total = tl.load(sums + tl.cast(count, tl.int64) * FIRST, mask=inside, other=0.0)
    else:
        total = _subtree(sums, count, inside, FIRST, NUMBER // 2)
        total += _subtree(sums, count, inside, FIRST + NUMBER // 2, NUMBER // 2)
    return total


@triton.jit
def _add_kernel(
    sums_ptr,
    result_ptr,
    count,
    SUBTREES: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    place = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    total = _subtree(sums_ptr + place, count, inside, 0, SUBTREES)
    narrowed = narrow(total, result_ptr.dtype.element_ty, INTERPRETED)
    tl.store(result_ptr + place, narrowed, mask=inside)
