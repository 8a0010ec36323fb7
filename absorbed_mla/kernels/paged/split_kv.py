"""Split-KV heuristic on the device: where keys are cut into parts, from requests' lengths.

Programs of a part go through its keys one tile after the other, so that parts of equal work end
together, however unequal the requests are. Every cut costs a start and combining, so where tiles of
equal size fill the device anyway, they are not cut or are cut into equal splits; the way with the
least estimated time is taken. Lengths are on the device, and so is the decision, so that a CUDA
graph repeats it for every batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from absorbed_mla.kernels.triton_private import elementwise_max, elementwise_min, sum_combine

# Candidate sizes of equal splits: the longest request's keys, a half of them, a third, and so on
# (_DIVISIONS of these); then the share of a part when all work is dealt evenly, and more in steps
# of a sixteenth.
_SIZES = tl.constexpr(32)
_DIVISIONS = tl.constexpr(10)
_STEPS = tl.constexpr(16)
# In the time of a block of 64 keys: beginning and ending a tile, launching the combining, and
# combining one split. The last two were measured on an H200 (a block took 2 us).
START = tl.constexpr(2)
_MERGE = tl.constexpr(3.0)
_MERGE_SPLIT = tl.constexpr(1 / 64)


@triton.jit
def choose_step(
    lengths_ptr,
    kv_ptr,
    num_requests,
    key_start,
    window,
    parts,
    min_blocks,
    head_blocks,
    TILE_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Work of a part in blocks of keys, and whether every tile begins a part of its own.

    If not, all tiles one after the other are cut every so many blocks, where each tile counts for
    ``START`` blocks more than it has.
    """
    longest, all_blocks, num_tiles = 0, 0, 0
    for first in range(0, num_requests, REQUESTS):
        length, kv_length = load_lengths(
            lengths_ptr, kv_ptr, first, num_requests, key_start, REQUESTS
        )
        tiles, blocks = work(length, kv_length, window, TILE_TOKENS, BLOCK_KEYS)
        all_blocks += tl.reduce(tiles * blocks, 0, sum_combine)
        num_tiles += tl.reduce(tiles, 0, sum_combine)
        there = tl.where(tiles > 0, blocks, 0)
        longest = tl.maximum(longest, tl.reduce(there, 0, elementwise_max))
    dealt = all_blocks + num_tiles * START
    share = tl.maximum(ceil_div(dealt, parts), min_blocks)
    # [SIZES]
    number = tl.arange(0, _SIZES)
    size = tl.where(
        number < _DIVISIONS,
        ceil_div(longest, number + 1),
        ceil_div(ceil_div(all_blocks, parts) * (_STEPS + number - _DIVISIONS), _STEPS),
    )
    size = tl.maximum(size, min_blocks)
    splits = tl.full([_SIZES], 0, tl.int32)
    for first in range(0, num_requests, REQUESTS):
        length, kv_length = load_lengths(
            lengths_ptr, kv_ptr, first, num_requests, key_start, REQUESTS
        )
        tiles, blocks = work(length, kv_length, window, TILE_TOKENS, BLOCK_KEYS)
        # [SIZES, REQUESTS]; in fp32, as integer division is slow. Exact up to 2**19 blocks: half a
        # block on either side is more than is lost by rounding.
        each = (blocks[None, :] + size[:, None]).to(tl.float32) - 0.5
        each = (each * (1.0 / size.to(tl.float32))[:, None]).to(tl.int32)
        splits += tl.reduce(each * tiles[None, :], 1, sum_combine)
    merging = tl.where(splits > num_tiles, _MERGE + splits * head_blocks * _MERGE_SPLIT, 0.0)
    end = tl.where(splits <= parts, size + START + merging, float("inf"))
    best = tl.reduce(end, 0, elementwise_min)
    step = tl.reduce(tl.where(end == best, size, 0), 0, elementwise_max)
    # A part may end one tile and begin another, which then wait both.
    waiting = 2 * ceil_div(dealt, share) * head_blocks
    end = share + START + _MERGE + waiting * _MERGE_SPLIT
    together = end < best
    step = tl.where(together, share, step)
    # Whole tiles, if all are equal.
    whole = ceil_div(num_tiles, parts) * (longest + START)
    uncut = together & (num_tiles * longest == all_blocks) & (whole <= end)
    return tl.where(uncut, whole, step), together


@triton.jit
def load_lengths(lengths_ptr, kv_ptr, first, num_requests, key_start, REQUESTS: tl.constexpr):
    """New tokens of requests from ``first`` on, and their keys in the cache, [REQUESTS]."""
    request = first + tl.arange(0, REQUESTS)
    length = tl.load(lengths_ptr + request, mask=request < num_requests, other=0)
    return length, tl.load(kv_ptr + request, mask=request < num_requests, other=0) - key_start


@triton.jit
def work(length, kv_length, window, TILE_TOKENS: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Tiles of requests with so many new tokens, and blocks of keys of each.

    Tiles of a request count alike, even if the first tokens see fewer keys; one without keys has a
    block, too, since its result must be written.
    """
    keys = tl.minimum(tl.maximum(kv_length, 1), window)
    return ceil_div(length, TILE_TOKENS), ceil_div(keys, BLOCK_KEYS)


@triton.jit
def ceil_div(number, divisor):
    """Of numbers that are not negative, rounded up."""
    return (number + divisor - 1) // divisor
