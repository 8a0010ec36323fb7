"""Index keys in FP8, rounded when a block of them was loaded."""

from __future__ import annotations

import triton
import triton.language as tl

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
    wide *= reciprocal[:, None]
    if INTERPRETED:
        # It would round halves up. Three bits of mantissa, or multiples of the least number.
        bits = wide.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
        normal = bits.to(tl.float32, bitcast=True)
        wide = tl.where(tl.abs(wide) < 2**-6, (wide + 24576.0) - 24576.0, normal)
    return wide.to(tl.float8e4nv), scales
