"""Kernel of QK-clip's max logits: computes QK scores again in tiles with a large LSE only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.triton.common import precision, product, row_max, rows_contiguous
from absorbed_mla.kernels.triton.launch import shared_memory
from absorbed_mla.kernels.triton_private import elementwise_max

# Queries of a program.
QUERIES = 128
# Tiles of one head whose programs run at about the same time: they read the same keys, and what
# they find lets later tiles be left out.
_TOGETHER = 8
# Keys of a step, and steps in shared memory; the first that fits is taken.
_STEPS = ((128, 3), (128, 2), (64, 2), (32, 2), (16, 1))
# Above the error of any LSE. A tile that holds the largest score is not left out by its rounding,
# so that the result does not depend on which program comes first.
_MARGIN = tl.constexpr(1e-3)


def largest_scores(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    of_heads: Tensor,
    tiles: Tensor,
    scale: float,
    threshold: float,
) -> None:
    """Raise ``of_heads`` to the largest scores, or to bounds of them up to the threshold.

    Args:
        q: [S_q, B, N, D], bf16, fp16 or fp32.
        k: [S_k, B, N, D].
        lse: fp32 [S_q, B, N].
        of_heads: fp32 [N], contiguous.
        tiles: Of ``query_tiles`` with :data:`QUERIES` tokens, int32 [tiles, 5] on the device.
        scale: Multiplies the scores; positive.
        threshold: See ``MaxLogits``.
    """
    q, k = rows_contiguous(q, k)
    _, batch, heads, width = q.shape
    if not len(tiles) * batch * heads:
        return
    # A dot product takes widths that are powers of two: 192 is 128 and 64.
    low = 1 << (width.bit_length() - 1)
    high = max(16, triton.next_power_of_2(width - low)) if width > low else 0
    low = max(16, low)
    keys, stages = _step(q.device, (low + high) * q.element_size())
    groups = triton.cdiv(len(tiles), _TOGETHER)
    # Triton launches on the current device, whatever the tensors' is.
    with torch.cuda.device_of(q):
        _largest_kernel[(groups * batch * heads * _TOGETHER,)](
            q,
            k,
            lse,
            of_heads,
            tiles,
            len(tiles),
            heads,
            batch * heads,
            *q.stride()[:3],
            *k.stride()[:3],
            *lse.stride(),
            scale,
            threshold,
            WIDTH=width,
            LOW=low,
            HIGH=high,
            TOGETHER=_TOGETHER,
            BLOCK_M=QUERIES,
            BLOCK_N=keys,
            PRECISION=precision(q.dtype),
            INTERPRETED=not isinstance(_largest_kernel, triton.runtime.JITFunction),
            num_warps=8,
            num_stages=stages,
        )


def _step(device: torch.device, row_bytes: int) -> tuple[int, int]:
    """Keys of a step and steps in shared memory, as many as fit beside the queries."""
    limit, _ = shared_memory(device)
    fitting = (step for step in _STEPS if (QUERIES + step[0] * step[1]) * row_bytes <= limit)
    return next(fitting, _STEPS[-1])


@triton.jit
def _largest_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    of_heads_ptr,
    tiles_ptr,
    num_tiles,
    heads,
    batch_heads,
    q_s,
    q_b,
    q_n,
    k_s,
    k_b,
    k_n,
    lse_s,
    lse_b,
    lse_n,
    scale,
    threshold,
    WIDTH: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Programs in order: some tiles of the first head, of every other head, then more tiles.
    place, within = tl.program_id(0) // TOGETHER, tl.program_id(0) % TOGETHER
    tile_index = (place // batch_heads) * TOGETHER + within
    batch = ((place % batch_heads) // heads).to(tl.int64)
    head = ((place % batch_heads) % heads).to(tl.int64)
    if tile_index < num_tiles:
        tile = tiles_ptr + tile_index * 5
        query_start, query_end = tl.load(tile), tl.load(tile + 1)
        # [BLOCK_M]
        row = tl.arange(0, BLOCK_M)
        valid = query_start + row < query_end
        token = (query_start + row).to(tl.int64)
        lse_rows = lse_ptr + token * lse_s + batch * lse_b + head * lse_n
        lse = tl.load(lse_rows, mask=valid, other=float("-inf"))
        bound = tl.reduce(lse, 0, elementwise_max)
        # An atomic that changes nothing: one thread reads for all. After a load, threads that saw
        # another program's finding would go another way than those that did not.
        found = tl.atomic_max(of_heads_ptr + head, float("-inf"), sem="relaxed")
        if bound + _MARGIN > tl.where(found > threshold, found, threshold):
            q_rows = q_ptr + token * q_s + batch * q_b + head * q_n
            key_rows = k_ptr + batch * k_b + head * k_n
            largest = _largest_of_tile(
                tile, row, valid, q_rows, key_rows, k_s,
                WIDTH, LOW, HIGH, BLOCK_M, BLOCK_N, PRECISION, INTERPRETED,
            )  # fmt: skip
            # Plus zero: the atomic would take -0 for less than any number.
            tl.atomic_max(of_heads_ptr + head, largest * scale + 0.0, sem="relaxed")
        elif bound > found:
            tl.atomic_max(of_heads_ptr + head, bound, sem="relaxed")


@triton.jit
def _largest_of_tile(
    tile,
    row,
    valid,
    q_rows,
    key_rows,
    k_s,
    WIDTH: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The largest product of a query and a key that it sees."""
    key_start, key_end, offset = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    q_low = _columns(q_rows, valid, 0, LOW, WIDTH)
    if HIGH > 0:
        q_high = _columns(q_rows, valid, LOW, HIGH, WIDTH)
    else:
        q_high = q_low
    # [BLOCK_M, BLOCK_N]: over the rows only at the end.
    largest = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    # All queries see the keys of whole blocks before this one.
    seen_by_all = tl.minimum(key_end - key_start, offset + 1)
    masked = key_start + tl.maximum(seen_by_all, 0) // BLOCK_N * BLOCK_N
    for start in range(key_start, masked, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        scores = _products(
            q_low, q_high, key_rows + key.to(tl.int64) * k_s, key < key_end,
            WIDTH, LOW, HIGH, PRECISION, INTERPRETED,
        )  # fmt: skip
        largest = tl.maximum(largest, scores)
    for start in range(masked, key_end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        there = key < key_end
        scores = _products(
            q_low, q_high, key_rows + key.to(tl.int64) * k_s, there,
            WIDTH, LOW, HIGH, PRECISION, INTERPRETED,
        )  # fmt: skip
        seen = ((key - key_start)[None, :] <= (row + offset)[:, None]) & there[None, :]
        largest = tl.maximum(largest, tl.where(seen, scores, float("-inf")))
    largest = tl.where(valid[:, None], largest, float("-inf"))
    return tl.reduce(row_max(largest), 0, elementwise_max)


@triton.jit
def _products(
    q_low,
    q_high,
    k_rows,
    there,
    WIDTH: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Products [BLOCK_M, BLOCK_N] of queries and keys."""
    scores = tl.full([q_low.shape[0], k_rows.shape[0]], 0.0, tl.float32)
    k_low = _columns(k_rows, there, 0, LOW, WIDTH)
    scores = product(q_low, tl.trans(k_low), scores, PRECISION, INTERPRETED)
    if HIGH > 0:
        k_high = _columns(k_rows, there, LOW, HIGH, WIDTH)
        scores = product(q_high, tl.trans(k_high), scores, PRECISION, INTERPRETED)
    return scores


@triton.jit
def _columns(rows, valid, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Columns [rows, COUNT] from ``FIRST`` on; zero beyond the last one and where not valid."""
    column = FIRST + tl.arange(0, COUNT)
    mask = valid[:, None]
    if FIRST + COUNT > WIDTH:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)
