"""Kernel of a matrix product whose rows get the same bits among any number of rows.

The order of sums is that of ``tiles.py``. One program computes part after part of a tile. Where
there are few tiles, and in the last ones of a product that would keep a part of the device busy
only, each part has a program, which stores its sum in fp32, and a second kernel adds the parts.
Both add the same parts in the same order, and so does the kernel of many rows for Hopper
(hopper/product_kernel.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.invariant import groups
from absorbed_mla.kernels.invariant.parts import sum_of_parts
from absorbed_mla.kernels.invariant.tiles import (
    GROUP,
    PART,
    SUMMANDS,
    WIDE_TILE,
    Tile,
    is_wide_faster,
    part_length,
    tile_for,
)
from absorbed_mla.kernels.scratch import not_filled
from absorbed_mla.kernels.triton.common import interpreted, narrow, precision

_GROUP = tl.constexpr(GROUP)
_place_in_groups = triton.jit(groups.place_in_groups)
# Elements of a program that adds parts, and parts that it loads together.
_ADDED, _AT_ONCE = 512, 8


def matrix_product(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    tile: Tile | None = None,
    split: bool | None = None,
    part: int | None = None,
) -> Tensor:
    """Multiply two matrices in fp32, with an optional bias added before the result is rounded.

    Args:
        left: [rows, summands], bf16, fp16 or fp32, any strides.
        right: [summands, columns], in the dtype of ``left``, any strides.
        bias: What can be expanded to [rows, columns], any floating dtype.
        dtype: Of the result; None: that of ``left``.
        tile: Instead of the one of ``tiles.py``; no bit depends on it. A wide one takes what
            ``can_multiply`` of hopper/product.py says.
        split: Whether parts have programs of their own, in all tiles or in none; None: as the tile
            has it. No bit depends on it. A wide tile has none.
        part: Summands of a part; None: as ``tiles.py`` has it by the number of columns.

    Returns:
        [rows, columns].
    """
    rows, summands = left.shape
    columns = right.shape[1]
    assert right.shape[0] == summands and left.dtype == right.dtype
    with not_filled():
        result = torch.empty(rows, columns, dtype=dtype or left.dtype, device=left.device)
    if not result.numel():
        return result
    part = part or part_length(summands, columns, PART)
    parts = triton.cdiv(summands, part)
    if tile is None and split is None and _is_wide_chosen(left, right, bias, result, parts):
        tile = WIDE_TILE
    tile = tile or tile_for(rows, columns, parts, left.dtype)
    if tile.is_wide:
        _multiply_wide(left, right, bias, result, part, tile)
        return result
    tiles = tile.count(rows, columns)
    in_parts = tile.in_parts(rows, columns, parts) if split is None else split * tiles
    whole = tiles - in_parts
    # Columns from here on are those of tiles in parts.
    first = whole // tile.row_tiles(rows) * tile.columns
    bias_ = result if bias is None else bias.expand(rows, columns)
    with not_filled():
        shape = (parts, rows, columns - first) if in_parts else (1,)
        sums = torch.empty(shape, dtype=torch.float32, device=left.device)
    # What Triton is told of the number of rows: rows that lie beside each other (a gradient of
    # weights) are loaded in vectors only if it is a multiple. Else one kernel serves all numbers.
    unit = 16 if left.stride(0) == 1 and rows % 16 == 0 else 1
    # Triton launches on the current device, whatever the tensors' is.
    with torch.cuda.device_of(left):
        _product_kernel[(whole + in_parts * parts,)](
            left,
            right,
            bias_,
            result,
            sums,
            rows // unit,
            columns,
            summands,
            part,
            whole,
            in_parts,
            first,
            *left.stride(),
            *right.stride(),
            *bias_.stride(),
            UNIT=unit,
            BLOCK_R=tile.rows,
            BLOCK_C=tile.columns,
            BLOCK_K=SUMMANDS[left.dtype],
            HAS_BIAS=bias is not None,
            PRECISION=precision(left.dtype),
            INTERPRETED=interpreted(),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if in_parts:
            _add_parts(sums, bias, bias_, result, first)
    return result


def has_wide_tile(device: torch.device) -> bool:
    """Whether there is a kernel for ``WIDE_TILE``."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _is_wide_chosen(
    left: Tensor, right: Tensor, bias: Tensor | None, result: Tensor, parts: int
) -> bool:
    """Whether ``WIDE_TILE`` is possible and faster than others."""
    if not is_wide_faster(*result.shape, parts) or not has_wide_tile(result.device):
        return False
    # Imported here, because Triton's versions for other devices need not have Gluon.
    from absorbed_mla.kernels.hopper.product import can_multiply

    return can_multiply(left, right, bias, result)


def _multiply_wide(
    left: Tensor, right: Tensor, bias: Tensor | None, result: Tensor, part: int, tile: Tile
) -> None:
    from absorbed_mla.kernels.hopper import product

    assert product.can_multiply(left, right, bias, result), "not for this tile"
    with torch.cuda.device_of(left):
        product.multiply(left, right, bias, result, part, tile.num_stages)


def _add_parts(
    sums: Tensor, bias: Tensor | None, expanded_bias: Tensor, result: Tensor, first: int
) -> None:
    """Add the parts of the columns from ``first`` on."""
    parts, rows, columns = sums.shape
    _add_kernel[(triton.cdiv(rows * columns, _ADDED),)](
        sums,
        expanded_bias,
        result,
        rows * columns,
        first,
        columns,
        parts,
        *expanded_bias.stride(),
        BLOCK=_ADDED,
        AT_ONCE=_AT_ONCE,
        HAS_BIAS=bias is not None,
        INTERPRETED=interpreted(),
    )


@triton.jit(do_not_specialize=["row_units", "whole", "in_parts", "first_in_parts"])
def _product_kernel(
    left_ptr,
    right_ptr,
    bias_ptr,
    result_ptr,
    sums_ptr,
    row_units,
    columns,
    summands,
    part_length,
    whole,
    in_parts,
    first_in_parts,
    stride_l_r,
    stride_l_k,
    stride_r_k,
    stride_r_c,
    stride_b_r,
    stride_b_c,
    UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    rows = row_units * UNIT
    tile, first, past = tl.program_id(0), 0, summands
    is_part = tile >= whole
    if is_part:
        first = (tile - whole) // in_parts * part_length
        past = first + 1
        tile = whole + (tile - whole) % in_parts
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
    total = sum_of_parts(
        left,
        right,
        row_there,
        column_there,
        first,
        past,
        part_length,
        summands,
        stride_l_k,
        stride_r_k,
        BLOCK_R,
        BLOCK_C,
        BLOCK_K,
        PRECISION,
        INTERPRETED,
    )
    row, column = first_row + row, first_column + column
    there = row_there & column_there
    if is_part:
        width = columns - first_in_parts
        sums = sums_ptr + tl.cast(first // part_length, tl.int64) * rows * width - first_in_parts
        tl.store(sums + row.to(tl.int64)[:, None] * width + column[None, :], total, mask=there)
    else:
        if HAS_BIAS:
            at = row.to(tl.int64)[:, None] * stride_b_r + column[None, :] * stride_b_c
            total += tl.load(bias_ptr + at, mask=there, other=0.0).to(tl.float32)
        tl.store(
            result_ptr + row.to(tl.int64)[:, None] * columns + column[None, :],
            narrow(total, result_ptr.dtype.element_ty, INTERPRETED),
            mask=there,
        )


@triton.jit
def _add_kernel(
    sums_ptr,
    bias_ptr,
    result_ptr,
    count,
    first_column,
    width,
    parts,
    stride_b_r,
    stride_b_c,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    total = tl.full([BLOCK], 0.0, tl.float32)
    for first in range(0, parts, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            part = first + i
            sums = sums_ptr + tl.cast(part, tl.int64) * count + place
            # What is beyond the last part is +0, which changes no bit of a sum that began with +0.
            total += tl.load(sums, mask=inside & (part < parts), other=0.0)
    row, column = place // width, first_column + place % width
    if HAS_BIAS:
        bias = bias_ptr + row.to(tl.int64) * stride_b_r + column * stride_b_c
        total += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        result_ptr + row.to(tl.int64) * (first_column + width) + column,
        narrow(total, result_ptr.dtype.element_ty, INTERPRETED),
        mask=inside,
    )
