"""How many keys a program takes: what an estimate says is over first, from the rows' lengths.

Cutting rows evens out the work of multiprocessors, but every program starts and ends, and parts are
merged. The lengths are on the device, and so is the decision: a CUDA graph replays it.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Sizes of parts that are compared: the longest row's, a half of it, a third, ..; and what a program
# gets when all the work is dealt out in so many fifths of the programs that run at a time.
_SIZES = tl.constexpr(32)
_DIVISIONS = tl.constexpr(10)
_FIRST_FIFTHS = tl.constexpr(4)
# Measured on an H200, in blocks of 64 keys (2 us): starting and ending a program, merging, and a
# part's share of the merging's bytes.
_START = tl.constexpr(3.0)
_MERGE = tl.constexpr(3.0)
_MERGE_PART = tl.constexpr(1 / 64)


@triton.jit
def size_of_parts(
    lengths_ptr,
    kv_ptr,
    num_rows,
    key_start,
    window,
    more,
    at_a_time,
    least,
    fixed,
    head_blocks,
    TILE_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Blocks of keys of a part, and how many equal parts that makes of all tiles."""
    part_blocks = window // BLOCK_KEYS + 1
    all_equal = 0
    if more > 0:
        if fixed == 0:
            part_blocks = _fastest_size(
                lengths_ptr,
                kv_ptr,
                num_rows,
                key_start,
                window,
                more,
                at_a_time,
                least,
                head_blocks,
                TILE_TOKENS,
                BLOCK_KEYS,
                ROWS,
            )
        for first in range(0, num_rows, ROWS):
            length, kv_length = load_lengths(lengths_ptr, kv_ptr, first, num_rows, key_start, ROWS)
            tiles, blocks = work(length, kv_length, window, TILE_TOKENS, BLOCK_KEYS)
            equal, _, _ = parts_of(blocks, part_blocks, fixed)
            all_equal += tl.reduce(equal * tiles, 0, tl.standard._sum_combine)
    return part_blocks, all_equal


@triton.jit
def _fastest_size(
    lengths_ptr,
    kv_ptr,
    num_rows,
    key_start,
    window,
    more,
    at_a_time,
    least,
    head_blocks,
    TILE_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The size with which the last program ends first, by an estimate."""
    longest, all_work, num_tiles = 0, 0, 0
    for first in range(0, num_rows, ROWS):
        length, kv_length = load_lengths(lengths_ptr, kv_ptr, first, num_rows, key_start, ROWS)
        tiles, blocks = work(length, kv_length, window, TILE_TOKENS, BLOCK_KEYS)
        blocks = tl.where(tiles > 0, blocks, 0)
        all_work += tl.reduce(tiles * blocks, 0, tl.standard._sum_combine)
        num_tiles += tl.reduce(tiles, 0, tl.standard._sum_combine)
        longest = tl.maximum(longest, tl.reduce(blocks, 0, tl.standard._elementwise_max))
    # [SIZES]
    number = tl.arange(0, _SIZES)
    dealt = tl.maximum(at_a_time * (number - _DIVISIONS + _FIRST_FIFTHS), 1)
    size = tl.where(
        number < _DIVISIONS,
        (longest + number) // (number + 1),
        (all_work * head_blocks * 5 + dealt - 1) // dealt,
    )
    size = tl.maximum(size, least)
    parts = tl.full([_SIZES], 0, tl.int32)
    equal = tl.full([_SIZES], 0, tl.int32)
    for first in range(0, num_rows, ROWS):
        length, kv_length = load_lengths(lengths_ptr, kv_ptr, first, num_rows, key_start, ROWS)
        tiles, blocks = work(length, kv_length, window, TILE_TOKENS, BLOCK_KEYS)
        tiles, blocks = tiles[None, :], blocks[None, :]
        # [SIZES, ROWS]; whole parts, and what is left over: integer division is slow.
        full = (blocks.to(tl.float32) / size.to(tl.float32)[:, None]).to(tl.int32)
        over = blocks - full * size[:, None]
        full += tl.where(over >= size[:, None], 1, tl.where(over < 0, -1, 0))
        # A row without keys is a program, too.
        each = tl.maximum(full + tl.where(full * size[:, None] < blocks, 1, 0), 1)
        parts += tl.reduce(each * tiles, 1, tl.standard._sum_combine)
        equal += tl.reduce(full * tiles, 1, tl.standard._sum_combine)
    fits = parts - num_tiles <= more
    merging = tl.where(parts > num_tiles, _MERGE + parts * head_blocks * _MERGE_PART, 0.0)
    all_parts = (parts * head_blocks).to(tl.float32)
    all_equal = (equal * head_blocks).to(tl.float32)
    each = size.to(tl.float32) + _START
    # Waves of equal parts, then the rest: shorter parts and rows, the first of them beside the last
    # wave. Half of one is waited for in the end, more if they do not fit beside it.
    waves = tl.ceil(all_equal / at_a_time) * each
    whole = (all_work * head_blocks).to(tl.float32) + all_parts * _START
    rest = whole - all_equal * each
    beside = waves * at_a_time - all_equal * each
    mean_rest = rest / tl.maximum(all_parts - all_equal, 1.0)
    waited = tl.where(rest > beside, 0.75, 0.5 * rest / tl.maximum(beside, 1.0)) * mean_rest
    end = tl.maximum(waves, whole / at_a_time) + waited
    end = tl.where(all_parts > all_equal, end, waves)
    end = tl.minimum(end, tl.ceil(all_parts / at_a_time) * each) + merging
    end = tl.where(fits, end, float("inf"))
    best = tl.reduce(end, 0, tl.standard._elementwise_min)
    return tl.reduce(tl.where(end == best, size, 0), 0, tl.standard._elementwise_max)


@triton.jit
def load_lengths(lengths_ptr, kv_ptr, first, num_rows, key_start, ROWS: tl.constexpr):
    """New tokens of rows from ``first`` on, and keys behind the first in the cache, [ROWS]."""
    row = first + tl.arange(0, ROWS)
    length = tl.load(lengths_ptr + row, mask=row < num_rows, other=0)
    return length, tl.load(kv_ptr + row, mask=row < num_rows, other=0) - key_start


@triton.jit
def work(length, kv_length, window, TILE_TOKENS: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Tiles of rows with so many new tokens, and blocks of their keys in the cache."""
    keys = tl.minimum(tl.maximum(kv_length, 0), window)
    return (length + TILE_TOKENS - 1) // TILE_TOKENS, (keys + BLOCK_KEYS - 1) // BLOCK_KEYS


@triton.jit
def parts_of(blocks, size, fixed):
    """Equal parts of rows (none: a row is uncut), whether a shorter one follows, and their size."""
    part = tl.where(fixed > 0, tl.maximum((blocks + fixed - 1) // tl.maximum(fixed, 1), 1), size)
    cut = tl.where(fixed > 0, fixed > 1, blocks > size)
    equal = tl.where(cut, tl.where(fixed > 0, fixed, blocks // tl.maximum(part, 1)), 0)
    last = tl.where(cut & (fixed == 0) & (equal * part < blocks), 1, 0)
    return equal, last, part
