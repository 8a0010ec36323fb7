"""Index keys in FP8, rounded when a block of them was loaded."""

from __future__ import annotations

import triton
import triton.language as tl

from absorbed_mla.kernels.e4m3 import to_e4m3
from absorbed_mla.kernels.triton.common import row_max


@triton.jit
def fp8_keys(keys, INTERPRETED: tl.constexpr):
    """Rows [N, D] as e4m3, and the power of two [N] that each was divided by.

    The same bits as ``dsa/fp8_rows.py``: see there.
    """
    wide = keys.to(tl.float32)
    largest = tl.maximum(row_max(tl.abs(wide)), 1e-4)
    bits = (largest.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000
    bits -= 8 << 23
    # The reciprocal of a power of two has the negated exponent.
    reciprocal = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    scales = bits.to(tl.float32, bitcast=True)
    return to_e4m3(wide * reciprocal[:, None], INTERPRETED), scales
