"""The order in which batch-invariant products sum an element, for all of their kernels.

That for Hopper has it in ``_sum`` of hopper/product_kernel.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from absorbed_mla.kernels.triton.common import product


@triton.jit
def sum_of_parts(
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
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Parts of ``part_length`` summands of a tile, each summed in steps, added one by one in fp32.

    Args:
        left: Pointers [BLOCK_R, BLOCK_K] to the first summands of the tile's rows.
        right: Pointers [BLOCK_K, BLOCK_C] to those of its columns.
        row_there: Whether the product has such a row, [BLOCK_R, 1].
        column_there: Likewise, [1, BLOCK_C].
        first: The first summand of the first part.
        past: What the first summand of every part is below.
        part_length: Of ``tiles.py``.
        summands: Of an element.
        stride_l_k: From summand to summand in ``left``.
        stride_r_k: In ``right``.
    """
    k = tl.arange(0, BLOCK_K)
    total = tl.full([BLOCK_R, BLOCK_C], 0.0, tl.float32)
    for start in range(first, past, part_length):
        part = tl.full([BLOCK_R, BLOCK_C], 0.0, tl.float32)
        for step in range(start, tl.minimum(start + part_length, summands), BLOCK_K):
            there = k < summands - step
            a = tl.load(
                left + tl.cast(step, tl.int64) * stride_l_k,
                mask=row_there & there[None, :],
                other=0.0,
            )
            b = tl.load(
                right + tl.cast(step, tl.int64) * stride_r_k,
                mask=there[:, None] & column_there,
                other=0.0,
            )
            part = product(a, b, part, PRECISION, INTERPRETED)
        total += part
    return total
