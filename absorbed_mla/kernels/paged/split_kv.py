"""Choose the split-KV size on the device, from the lengths of the requests.

Splitting balances the work of multiprocessors, but costs the start and end of more programs and the
combining of splits; the size with the least estimated time is taken. Lengths are on the device, and
so is the decision, so that a CUDA graph repeats it for every batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Candidate sizes: the longest request's keys, a half of them, a third, and so on (_DIVISIONS of
# these); then the share of a program when all work is dealt evenly to _FIRST_FIFTHS / 5 of the
# programs that run at a time, to one fifth more, and so on.
_SIZES = tl.constexpr(32)
_DIVISIONS = tl.constexpr(10)
_FIRST_FIFTHS = tl.constexpr(4)
# Measured on an H200, in the time of a block of 64 keys (2 us): starting and ending a program,
# launching the combining, and combining one split.
_START = tl.constexpr(3.0)
_MERGE = tl.constexpr(3.0)
_MERGE_SPLIT = tl.constexpr(1 / 64)


@triton.jit
def choose_split_size(
    lengths_ptr,
    kv_ptr,
    num_requests,
    key_start,
    window,
    max_extra,
    concurrent,
    min_blocks,
    num_splits,
    head_blocks,
    TILE_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Blocks of keys in a split, and the number of equal splits of all tiles together."""
    split_blocks = window // BLOCK_KEYS + 1
    all_equal = 0
    if max_extra > 0:
        if num_splits == 0:
            split_blocks = _fastest_size(
                lengths_ptr,
                kv_ptr,
                num_requests,
                key_start,
                window,
                max_extra,
                concurrent,
                min_blocks,
                head_blocks,
                TILE_TOKENS,
                BLOCK_KEYS,
                REQUESTS,
            )
        for first in range(0, num_requests, REQUESTS):
            length, kv_length = load_lengths(
                lengths_ptr, kv_ptr, first, num_requests, key_start, REQUESTS
            )
            tiles, blocks = work(length, kv_length, window, TILE_TOKENS, BLOCK_KEYS)
            equal, _, _ = splits_of(blocks, split_blocks, num_splits)
            all_equal += tl.reduce(equal * tiles, 0, tl.standard._sum_combine)
    return split_blocks, all_equal


@triton.jit
def _fastest_size(
    lengths_ptr,
    kv_ptr,
    num_requests,
    key_start,
    window,
    max_extra,
    concurrent,
    min_blocks,
    head_blocks,
    TILE_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """The candidate size with the least estimated time until the last program ends."""
    longest, all_work, num_tiles = 0, 0, 0
    for first in range(0, num_requests, REQUESTS):
        length, kv_length = load_lengths(
            lengths_ptr, kv_ptr, first, num_requests, key_start, REQUESTS
        )
        tiles, blocks = work(length, kv_length, window, TILE_TOKENS, BLOCK_KEYS)
        blocks = tl.where(tiles > 0, blocks, 0)
        all_work += tl.reduce(tiles * blocks, 0, tl.standard._sum_combine)
        num_tiles += tl.reduce(tiles, 0, tl.standard._sum_combine)
        longest = tl.maximum(longest, tl.reduce(blocks, 0, tl.standard._elementwise_max))
    # [SIZES]
    number = tl.arange(0, _SIZES)
    dealt = tl.maximum(concurrent * (number - _DIVISIONS + _FIRST_FIFTHS), 1)
    size = tl.where(
        number < _DIVISIONS,
        (longest + number) // (number + 1),
        (all_work * head_blocks * 5 + dealt - 1) // dealt,
    )
    size = tl.maximum(size, min_blocks)
    splits = tl.full([_SIZES], 0, tl.int32)
    equal = tl.full([_SIZES], 0, tl.int32)
    for first in range(0, num_requests, REQUESTS):
        length, kv_length = load_lengths(
            lengths_ptr, kv_ptr, first, num_requests, key_start, REQUESTS
        )
        tiles, blocks = work(length, kv_length, window, TILE_TOKENS, BLOCK_KEYS)
        tiles, blocks = tiles[None, :], blocks[None, :]
        # [SIZES, REQUESTS]; full splits and the remainder, in fp32: integer division is slow.
        full = (blocks.to(tl.float32) / size.to(tl.float32)[:, None]).to(tl.int32)
        over = blocks - full * size[:, None]
        full += tl.where(over >= size[:, None], 1, tl.where(over < 0, -1, 0))
        # A request without keys takes a program, too.
        each = tl.maximum(full + tl.where(full * size[:, None] < blocks, 1, 0), 1)
        splits += tl.reduce(each * tiles, 1, tl.standard._sum_combine)
        equal += tl.reduce(full * tiles, 1, tl.standard._sum_combine)
    fits = splits - num_tiles <= max_extra
    merging = tl.where(splits > num_tiles, _MERGE + splits * head_blocks * _MERGE_SPLIT, 0.0)
    all_splits = (splits * head_blocks).to(tl.float32)
    all_equal = (equal * head_blocks).to(tl.float32)
    each = size.to(tl.float32) + _START
    # Waves of equal splits, then the rest: shorter splits and requests, the first of them beside
    # the last wave. The end waits for half of one of them, for more if they do not fit beside it.
    waves = tl.ceil(all_equal / concurrent) * each
    whole = (all_work * head_blocks).to(tl.float32) + all_splits * _START
    rest = whole - all_equal * each
    beside = waves * concurrent - all_equal * each
    mean_rest = rest / tl.maximum(all_splits - all_equal, 1.0)
    waited = tl.where(rest > beside, 0.75, 0.5 * rest / tl.maximum(beside, 1.0)) * mean_rest
    end = tl.maximum(waves, whole / concurrent) + waited
    end = tl.where(all_splits > all_equal, end, waves)
    end = tl.minimum(end, tl.ceil(all_splits / concurrent) * each) + merging
    end = tl.where(fits, end, float("inf"))
    best = tl.reduce(end, 0, tl.standard._elementwise_min)
    return tl.reduce(tl.where(end == best, size, 0), 0, tl.standard._elementwise_max)


@triton.jit
def load_lengths(lengths_ptr, kv_ptr, first, num_requests, key_start, REQUESTS: tl.constexpr):
    """New tokens of requests from ``first`` on, and their keys in the cache, [REQUESTS]."""
    request = first + tl.arange(0, REQUESTS)
    length = tl.load(lengths_ptr + request, mask=request < num_requests, other=0)
    return length, tl.load(kv_ptr + request, mask=request < num_requests, other=0) - key_start


@triton.jit
def work(length, kv_length, window, TILE_TOKENS: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Tiles of requests with so many new tokens, and blocks of their keys in the cache."""
    keys = tl.minimum(tl.maximum(kv_length, 0), window)
    return (length + TILE_TOKENS - 1) // TILE_TOKENS, (keys + BLOCK_KEYS - 1) // BLOCK_KEYS


@triton.jit
def splits_of(blocks, size, num_splits):
    """Equal splits of requests (0: unsplit), whether a shorter one follows, and blocks in a split.

    Args:
        blocks: Blocks of keys of each request.
        size: Blocks of keys in a split.
        num_splits: Splits of every request, whatever ``size``; 0: as ``size`` says.
    """
    split = tl.where(
        num_splits > 0, tl.maximum((blocks + num_splits - 1) // tl.maximum(num_splits, 1), 1), size
    )
    is_split = tl.where(num_splits > 0, num_splits > 1, blocks > size)
    equal = tl.where(
        is_split, tl.where(num_splits > 0, num_splits, blocks // tl.maximum(split, 1)), 0
    )
    last = tl.where(is_split & (num_splits == 0) & (equal * split < blocks), 1, 0)
    return equal, last, split
