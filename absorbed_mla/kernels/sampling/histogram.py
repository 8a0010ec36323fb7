"""Histograms for top-k and top-p: token counts and softmax weights above each threshold."""

from __future__ import annotations

import triton
import triton.language as tl

from absorbed_mla.kernels.sampling.weights import ONE, count_in, sum_in
from absorbed_mla.kernels.triton.common import sum_of


@triton.jit
def count_reaching(keys, weights, edges):
    """Counts above sums of weights, int64 [WAYS], of the keys [BLOCK] at or above each edge."""
    one = weights | ONE
    return sum_of(tl.where(keys[None, :] >= edges[:, None], one[None, :], 0), 1)


@triton.jit
def publish(record_ptr, block, low, edges, reached_low, counted, COLUMNS: tl.constexpr):
    """Adds a block's counts and sums to those of its row; one block of the row writes the edges.

    Args:
        record_ptr: int64 [3, COLUMNS]: edges, sums, counts.
        block: Its number.
        low: The first edge.
        edges: The others.
        reached_low: Count and sum of the keys at or above the first edge.
        counted: Of those at or above the others.
        COLUMNS: Number of edges.
    """
    way = tl.arange(0, COLUMNS - 1)
    if block == 0:
        tl.store(record_ptr, low.to(tl.int64))
        tl.store(record_ptr + 1 + way, edges.to(tl.int64))
    sums_ptr, counts_ptr = record_ptr + COLUMNS, record_ptr + 2 * COLUMNS
    tl.atomic_add(sums_ptr, sum_in(reached_low), sem="relaxed")
    tl.atomic_add(sums_ptr + 1 + way, sum_in(counted), sem="relaxed")
    tl.atomic_add(counts_ptr, count_in(reached_low), sem="relaxed")
    tl.atomic_add(counts_ptr + 1 + way, count_in(counted), sem="relaxed")
