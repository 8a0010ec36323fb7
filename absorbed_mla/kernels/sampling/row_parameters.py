"""The sampling parameters of a row, as device functions."""

from __future__ import annotations

import triton
import triton.language as tl

# Places in the table: the order of ``serving/sampling/device_sampler.py``.
TEMPERATURE, RANDOM, MIN_P, TOP_K, TOP_P, SAMPLED = (tl.constexpr(i) for i in range(6))


@triton.jit
def load_parameter(parameters_ptr, row, stride_parameter, stride_row, PLACE: tl.constexpr):
    """One of a row's sampling parameters, float64."""
    return tl.load(parameters_ptr + PLACE * stride_parameter + row * stride_row)


@triton.jit
def load_min_p(parameters_ptr, row, stride_parameter, stride_row):
    """min_p as fp32, rounded up: no share is between the two."""
    exact = load_parameter(parameters_ptr, row, stride_parameter, stride_row, MIN_P)
    rounded = exact.to(tl.float32)
    above = (rounded.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.where(rounded.to(tl.float64) < exact, above, rounded)
