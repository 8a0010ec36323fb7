"""The FP8 format e4m3: three bits of mantissa and no infinity (arXiv:2209.05433)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_e4m3(wide, INTERPRETED: tl.constexpr):
    """fp32 numbers up to 448, rounded to nearest, ties to even."""
    if INTERPRETED:
        # It would round halves up. Three bits of mantissa, or multiples of the least number.
        bits = wide.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
        normal = bits.to(tl.float32, bitcast=True)
        wide = tl.where(tl.abs(wide) < 2**-6, (wide + 24576.0) - 24576.0, normal)
    return wide.to(tl.float8e4nv)


@triton.jit
def e4m3_bits(wide, INTERPRETED: tl.constexpr):
    """:func:`to_e4m3` as bytes, of numbers that may be NaN."""
    bits = to_e4m3(wide, INTERPRETED).to(tl.uint8, bitcast=True)
    if INTERPRETED:
        # It would make 384 of NaN, and zeros without a sign.
        sign = tl.where(wide.to(tl.int32, bitcast=True) < 0, 0x80, 0).to(tl.uint8)
        bits = tl.where(wide == wide, bits | sign, 0x7F).to(tl.uint8)
    return bits


@triton.jit
def from_e4m3(bits, INTERPRETED: tl.constexpr):
    """The fp32 numbers that bytes stand for."""
    if INTERPRETED:
        # It would read NaN as 480. Without a sign; the least exponent has no leading one.
        magnitude = (bits & 0x7F).to(tl.int32)
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        wide = tl.where(magnitude < 8, magnitude.to(tl.float32) * 2**-9, normal)
        wide = tl.where(magnitude == 0x7F, float("nan"), wide)
        wide = tl.where(bits >= 0x80, -wide, wide)
    else:
        wide = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return wide
