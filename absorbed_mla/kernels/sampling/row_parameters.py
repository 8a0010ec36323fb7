"""The numbers by which rows are drawn, as device functions."""

from __future__ import annotations

import triton
import triton.language as tl

# Places in the table: the order of ``generation.drawing``.
TEMPERATURE, RANDOM, MIN_P, TOP_K, TOP_P, SAMPLED = (tl.constexpr(i) for i in range(6))


@triton.jit
def load_number(numbers_ptr, row, stride_number, stride_row, PLACE: tl.constexpr):
    """One of a row's numbers, float64."""
    return tl.load(numbers_ptr + PLACE * stride_number + row * stride_row)


@triton.jit
def least_share(numbers_ptr, row, stride_number, stride_row):
    """min_p as fp32, rounded up: no share is between the two."""
    exact = load_number(numbers_ptr, row, stride_number, stride_row, MIN_P)
    rounded = exact.to(tl.float32)
    above = (rounded.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.where(rounded.to(tl.float64) < exact, above, rounded)
