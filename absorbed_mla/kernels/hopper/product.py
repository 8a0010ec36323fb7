"""Launcher of the Hopper GEMM of parity mode, for many rows, and what it can multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.kernels.hopper.product_kernel import multiply_rows
from absorbed_mla.kernels.hopper.product_shared import COLUMNS, QUARTER, ROWS, STEP
from absorbed_mla.kernels.hopper.tensor_map import has_map, tensor_map
from absorbed_mla.kernels.hopper.tree_product_kernel import (
    WIDTH,
    multiply_leaves,
    waiting_levels,
)
from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.paged.plan import processors
from absorbed_mla.kernels.scratch import not_filled


def can_multiply(left: Tensor, right: Tensor, bias: Tensor | None, result: Tensor) -> bool:
    """Whether ``multiply`` takes these: operands of 16 bits that lie as tensor maps describe.

    Args:
        left: [rows, summands].
        right: [summands, columns].
        bias: What can be expanded to [rows, columns], or None; the same for all rows.
        result: [rows, columns].
    """
    columns = result.shape[1]
    biased = bias is None or (bias.is_contiguous() and bias.numel() == bias.shape[-1] == columns)
    return _have_maps(left, right, result) and result.dtype == left.dtype and biased


def can_multiply_by_tree(left: Tensor, right: Tensor, result: Tensor, leaf: int) -> bool:
    """Whether ``multiply_by_tree`` takes these.

    Args:
        left: See ``can_multiply``, like ``right``.
        result: [rows, columns], also in fp32, contiguous then.
        leaf: Summands of a leaf.
    """
    if result.dtype not in (left.dtype, torch.float32) or leaf % STEP.value:
        return False
    contiguous = result.dtype == left.dtype or result.is_contiguous()
    return contiguous and _have_maps(left, right, result)


def _have_maps(left: Tensor, right: Tensor, result: Tensor) -> bool:
    if left.dtype not in (torch.bfloat16, torch.float16) or not left.numel():
        return False
    return has_map(result) and all(has_map(x) or has_map(x.T) for x in (left, right))


def multiply(
    left: Tensor, right: Tensor, bias: Tensor | None, result: Tensor, part: int, stages: int
) -> None:
    """``left @ right`` with the bias added in fp32, in the order of invariant/parts.py.

    Args:
        left: See ``can_multiply``, like the next three.
        result: Written.
        part: Summands of a part, a multiple of 64.
        stages: Steps of 64 summands in shared memory, at most 4.
    """
    sizes = _sizes(left, right, COLUMNS.value, part)
    launch(
        multiply_rows,
        (min(processors(left.device), sizes[0] * sizes[1]),),
        _operand_map(left, 2 * ROWS.value),
        _operand_map(right.T, COLUMNS.value),
        tensor_map(result, (ROWS.value, QUARTER.value)),
        result if bias is None else bias,
        *sizes,
        STAGES=stages,
        SEVERAL=left.shape[1] > part,
        HAS_BIAS=bias is not None,
        num_warps=4,
    )


def multiply_by_tree(
    left: Tensor, right: Tensor, result: Tensor, leaves: int, runs: int, stages: int
) -> None:
    """``left @ right`` in the order of invariant/tree_product.py.

    Args:
        left: See ``can_multiply_by_tree``, like the next two.
        result: Written.
        leaves: A power of 2, at least 2.
        runs: As there.
        stages: See ``multiply``.
    """
    leaf = left.shape[1] // leaves
    assert can_multiply_by_tree(left, right, result, leaf), "not for this tile"
    sizes = _sizes(left, right, WIDTH.value, leaf)
    programs = min(processors(left.device), sizes[0] * sizes[1])
    with not_filled():
        shape = programs, 2, waiting_levels(leaves), ROWS.value, WIDTH.value
        waiting = torch.empty(shape, dtype=torch.float32, device=left.device)
    fp32 = result.dtype == torch.float32
    launch(
        multiply_leaves,
        (programs,),
        _operand_map(left, 2 * ROWS.value),
        _operand_map(right.T, WIDTH.value),
        result if fp32 else tensor_map(result, (ROWS.value, QUARTER.value)),
        waiting,
        *sizes,
        STAGES=stages,
        LEAVES=leaves,
        RUNS=runs,
        FP32=fp32,
        num_warps=4,
    )


def _sizes(left: Tensor, right: Tensor, width: int, part: int) -> tuple[int, ...]:
    """What ``Work`` of product_kernel.py has, of tiles of so many columns."""
    (rows, summands), columns, step = left.shape, right.shape[1], STEP.value
    tiles = -(-rows // (2 * ROWS.value)), -(-columns // width)
    return *tiles, -(-summands // step), part // step, rows, columns


def _operand_map(x: Tensor, rows: int):
    """Of [rows, summands], whichever lie side by side."""
    return tensor_map(x, (rows, STEP.value)) if has_map(x) else tensor_map(x.T, (STEP.value, rows))
