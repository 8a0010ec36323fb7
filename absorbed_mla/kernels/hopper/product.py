"""Launcher of the Hopper GEMM of parity mode, for many rows, and what it can multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.kernels.hopper.product_kernel import multiply_rows
from absorbed_mla.kernels.hopper.product_shared import COLUMNS, QUARTER, ROWS, STEP
from absorbed_mla.kernels.hopper.tensor_map import has_map, tensor_map
from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.paged.plan import processors


def can_multiply(left: Tensor, right: Tensor, bias: Tensor | None, result: Tensor) -> bool:
    """Whether ``multiply`` takes these: operands of 16 bits that lie as tensor maps describe.

    Args:
        left: [rows, summands].
        right: [summands, columns].
        bias: What can be expanded to [rows, columns], or None; the same for all rows.
        result: [rows, columns].
    """
    if left.dtype not in (torch.bfloat16, torch.float16) or not left.numel():
        return False
    mapped = has_map(result) and all(has_map(x) or has_map(x.T) for x in (left, right))
    columns = result.shape[1]
    biased = bias is None or (bias.is_contiguous() and bias.numel() == bias.shape[-1] == columns)
    return result.dtype == left.dtype and mapped and biased


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
    (rows, summands), columns = left.shape, right.shape[1]
    step = STEP.value
    row_tiles, column_tiles = -(-rows // (2 * ROWS.value)), -(-columns // COLUMNS.value)
    launch(
        multiply_rows,
        (min(processors(left.device), row_tiles * column_tiles),),
        _operand_map(left, 2 * ROWS.value),
        _operand_map(right.T, COLUMNS.value),
        tensor_map(result, (ROWS.value, QUARTER.value)),
        result if bias is None else bias,
        row_tiles,
        column_tiles,
        -(-summands // step),
        part // step,
        columns,
        STAGES=stages,
        SEVERAL=summands > part,
        HAS_BIAS=bias is not None,
        num_warps=4,
    )


def _operand_map(x: Tensor, rows: int):
    """Of [rows, summands], whichever lie side by side."""
    return tensor_map(x, (rows, STEP.value)) if has_map(x) else tensor_map(x.T, (STEP.value, rows))
