"""FP8 quantization of index queries and keys: e4m3 with a scale for every row.

DeepSeek-V3.2 selects so in its released inference code. Scales are powers of two, as there: no bit
is lost by dividing by them, so that kernels and this module round alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
# Rows of smaller numbers have the scale of this one, so that scales have a reciprocal.
LEAST = 1e-4
# The largest number of e4m3 is 1.75 * 2**8: what exceeds this mantissa needs the next power of two.
_MANTISSA, _EXPONENT_OF_LARGEST = 0x600000, 8


class Fp8Rows(NamedTuple):
    """``values * scales[..., None]`` are rows of D numbers.

    Attributes:
        values: e4m3 [..., D].
        scales: fp32 [...], powers of two.
    """

    values: Tensor
    scales: Tensor


def to_fp8(rows: Tensor) -> Fp8Rows:
    """Round rows [..., D] of any float dtype to nearest, ties to even."""
    wide = rows.float()
    largest = wide.abs().amax(-1).clamp(min=LEAST)
    bits = (largest.view(torch.int32) + (0x7FFFFF - _MANTISSA)) & 0x7F800000
    scales = (bits - (_EXPONENT_OF_LARGEST << 23)).view(torch.float32)
    return Fp8Rows((wide / scales[..., None]).to(E4M3), scales)


def rounded_to_fp8(rows: Tensor) -> Tensor:
    """``rows`` as FP8 has them, in their own dtype (fp32 at least)."""
    values, scales = to_fp8(rows)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return values.to(dtype) * scales[..., None].to(dtype)


def fp8_query(query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Index queries [..., Hi, Di] in e4m3, and the weights [..., Hi] of their heads times scales.

    Without gradients: a choice has none.
    """
    values, scales = to_fp8(query.detach())
    return values, weights.detach() * scales
