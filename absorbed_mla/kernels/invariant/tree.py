"""The order in which products are summed with ``tensor_parallel_parts``, for their kernels.

The summands of an element are cut into leaves, equal ones, each summed in steps as one part is, and
the leaves are added by the tree of ``batch_invariant/tree.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from absorbed_mla.kernels.triton.common import product

# Sums that wait for their neighbours are registers of a program, one tile for each level.
MOST_LEAVES = 8


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
        RUNS: Leaf i is in run i % RUNS, at place i // RUNS of it.
        RUN: Leaves of a run.
    """
    k = tl.arange(0, BLOCK_K)
    steps = (leaf_length + BLOCK_K - 1) // BLOCK_K
    leaf = tl.full([BLOCK_R, BLOCK_C], 0.0, tl.float32)
    # Sums of so many leaves, the last ones of their level.
    two, four, eight = leaf, leaf, leaf
    # One loop, because a loop for each leaf would wait for its first operands.
    for step in range(0, LEAVES * steps):
        number, first = step // steps, step % steps * BLOCK_K
        there = k < leaf_length - first
        place = first_leaf + number
        start = tl.cast(place % RUNS * RUN + place // RUNS, tl.int64) * leaf_length + first
        a = tl.load(left + start * stride_l_k, mask=row_there & there[None, :], other=0.0)
        b = tl.load(right + start * stride_r_k, mask=there[:, None] & column_there, other=0.0)
        leaf = product(a, b, leaf, PRECISION, INTERPRETED)
        if LEAVES > 1:
            if first + BLOCK_K >= leaf_length:
                # Selected: a product whose result has two names is waited for each time.
                two = tl.where(number % 2 == 0, leaf, two + leaf)
                if LEAVES > 2:
                    if number % 2 == 1:
                        four = tl.where(number % 4 == 1, two, four + two)
                if LEAVES > 4:
                    if number % 4 == 3:
                        eight = tl.where(number % 8 == 3, four, eight + four)
                leaf = tl.full([BLOCK_R, BLOCK_C], 0.0, tl.float32)
    if LEAVES == 1:
        return leaf
    if LEAVES == 2:
        return two
    if LEAVES == 4:
        return four
    return eight
