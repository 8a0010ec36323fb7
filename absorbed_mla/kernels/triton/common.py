"""Device functions that the ``triton`` kernels share.

Rows of a block are heads and tokens together: row m is head m % HB of token m // HB, where HB, the
largest power of two that divides the number of heads, is at most the rows of a block. All heads
share one key, so a block of keys is loaded once for all of them.

Device code here avoids functions such as ``tl.max`` and ``tl.zeros``. Those are decorated when
Triton is imported, and where that was before TRITON_INTERPRET was set (Megatron-Core imports
Triton) they cannot run in the interpreter.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.triton_private import elementwise_max, sum_combine

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))


def rows_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, copied where their last dimension has another stride than 1."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def strides_of(*tensors: Tensor) -> list[int]:
    """Of all dimensions but the last, and of three at most, in the kernels' order."""
    return [stride for x in tensors for stride in x.stride()[: min(x.dim() - 1, 3)]]


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return not isinstance(load_rows, triton.runtime.JITFunction)


def precision(dtype: torch.dtype) -> str:
    """Input precision of matrix products: fp32 operands are not rounded to tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def load_rows(pointer, rows, valid, WIDTH: tl.constexpr):
    """Rows [BLOCK_M, WIDTH] at int64 offsets [BLOCK_M]; zero where not valid."""
    columns = tl.arange(0, WIDTH)
    return tl.load(pointer + rows[:, None] + columns[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def store_rows(pointer, rows, valid, values, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr):
    """Store fp32 values [BLOCK_M, WIDTH] in the pointer's type, at int64 offsets [BLOCK_M]."""
    pointers = pointer + rows[:, None] + tl.arange(0, WIDTH)[None, :]
    tl.store(pointers, narrow(values, pointer.dtype.element_ty, INTERPRETED), mask=valid[:, None])


@triton.jit
def product(left, right, total, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Total + left @ right in fp32; the interpreter would take the bits of bf16 for integers."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def narrow(values, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 values in another type, rounded to nearest; the interpreter would cut to bf16."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        bits = values.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        # NaN has the largest exponent, which rounding its mantissa must not carry out of.
        values = tl.where(values == values, bits.to(tl.float32, bitcast=True), values)
    return values.to(TYPE)


@triton.jit
def row_max(values):
    """Maximum of every row, [BLOCK_M] from [BLOCK_M, BLOCK_N]."""
    return max_of(values, 1)


@triton.jit
def row_sum(values):
    """Sum of every row, [BLOCK_M] from [BLOCK_M, BLOCK_N]."""
    return sum_of(values, 1)


@triton.jit
def max_of(values, AXIS: tl.constexpr = 0):
    """Largest values over an axis."""
    return tl.reduce(values, AXIS, elementwise_max)


@triton.jit
def sum_of(values, AXIS: tl.constexpr = 0):
    """Sums over an axis."""
    return tl.reduce(values, AXIS, sum_combine)


@triton.jit
def sum_before(values):
    """Sums of the values before each, over the first axis."""
    return tl.associative_scan(values, 0, sum_combine) - values
