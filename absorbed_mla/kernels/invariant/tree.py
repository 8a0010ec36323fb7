"""The order in which products are summed with ``tensor_parallel_parts``, for their kernels.

The summands of an element are cut into leaves, equal ones, each summed in steps as one part is, and
the leaves are added by the tree of ``batch_invariant/tree.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from absorbed_mla.kernels.triton.common import product


@triton.jit
def sum_by_tree(
    left,
    right,
    row_there,
    column_there,
    first_leaf,
    leaf_length,
    stride_l_k,
    stride_r_k,
    LEAVES: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Leaves of ``leaf_length`` summands of a tile, added in fp32 by a binary tree over neighbours.

    Args:
        left: Pointers [BLOCK_R, BLOCK_K] to the first summands of the tile's rows.
        right: Pointers [BLOCK_K, BLOCK_C] to those of its columns.
        row_there: Whether the product has such a row, [BLOCK_R, 1].
        column_there: Likewise, [1, BLOCK_C].
        first_leaf: The number of the first one.
        leaf_length: Any number; steps end with the leaf.
        stride_l_k: From summand to summand in ``left``.
        stride_r_k: In ``right``.
        LEAVES: 1, 2, 4 or 8.
        RUNS: Contiguous runs of leaves; leaf i is number i // RUNS of run i % RUNS.
        RUN: Leaves of a run.
    """
    k = tl.arange(0, BLOCK_K)
    nothing = tl.full([BLOCK_R, BLOCK_C], 0.0, tl.float32)
    # The latest sums of 1, 2, 4 and 8 leaves.
    leaf, two, four, eight = nothing, nothing, nothing, nothing
    number, first = 0, 0
    # One loop, because one for each leaf would wait for its first operands.
    for _ in range(LEAVES * ((leaf_length + BLOCK_K - 1) // BLOCK_K)):
        there = k < leaf_length - first
        place = first_leaf + number
        start = tl.cast(place % RUNS * RUN + place // RUNS, tl.int64) * leaf_length + first
        a = tl.load(left + start * stride_l_k, mask=row_there & there[None, :], other=0.0)
        b = tl.load(right + start * stride_r_k, mask=there[:, None] & column_there, other=0.0)
        leaf = product(a, b, leaf, PRECISION, INTERPRETED)
        first += BLOCK_K
        is_whole = first >= leaf_length
        if LEAVES > 1 and is_whole:
            # Selected, not assigned: an aliased wgmma accumulator is waited for at every step.
            two = tl.where(number % 2 == 0, leaf, two + leaf)
            if LEAVES > 2 and number % 2 == 1:
                four = tl.where(number % 4 == 1, two, four + two)
            if LEAVES > 4 and number % 4 == 3:
                eight = tl.where(number % 8 == 3, four, eight + four)
            leaf = nothing
        # Outside of the if: else prefetched loads depend on the sums.
        number = tl.where(is_whole, number + 1, number)
        first = tl.where(is_whole, 0, first)
    if LEAVES == 1:
        return leaf
    if LEAVES == 2:
        return two
    if LEAVES == 4:
        return four
    return eight
