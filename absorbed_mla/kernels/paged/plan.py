"""Block sizes and the number of splits of the paged kernels, from numbers that the host knows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from absorbed_mla.kernels.portable.launch import Blocks, launch_for, shared_memory

# With few heads and one token the products are small and memory is what takes time: few rows, whose
# products each warp does for keys of its own, and blocks of keys on their way meanwhile. More rows
# go as in training. Untuned.
_FEW_ROWS: dict[int, tuple[Blocks, ...]] = {
    16: (Blocks(16, 64, 3), Blocks(16, 32, 3), Blocks(16, 16, 3), Blocks(16, 16, 1)),
    32: (Blocks(32, 64, 3), Blocks(32, 32, 3), Blocks(32, 16, 3), Blocks(32, 16, 1)),
}
# What starting and ending a block costs, and merging one more part, as so many keys.
_START_KEYS = 192
_MERGE_KEYS = 8
_LEAST_SPLIT_KEYS = 256
# The host knows the longest row only. A grid with more splits than equal rows need has room for
# rows longer than the mean; programs without work end at once.
_MOST_SLACK = 4
# The interpreter has one; so few make it split.
_INTERPRETED_PROCESSORS = 4


class Tiles(NamedTuple):
    """How queries are cut into the tiles that programs work on.

    Attributes:
        heads: Heads in a tile, a power of two; those beyond N are idle.
        tokens: Tokens of one row in a tile.
        head_blocks: Tiles for all heads of a token.
        most: No batch of these shapes has more tiles of tokens.
    """

    heads: int
    tokens: int
    head_blocks: int
    most: int


class Splits(NamedTuple):
    """How keys are cut.

    Attributes:
        most: Parts of the longest row, at most; the size of the grid.
        programs: Over how many programs the work of the batch is spread.
        least_keys: In a part, unless there are no more.
    """

    most: int
    programs: int
    least_keys: int


@functools.lru_cache(maxsize=256)
def blocks_for(
    dtype: torch.dtype, width: int, rope: int, device: torch.device, rows: int | None
) -> tuple[Blocks, int]:
    """Blocks and warps.

    Args:
        dtype: Of the operands.
        width: C.
        rope: R.
        device: Where the kernels run.
        rows: Heads times tokens of the longest row; None for the blocks of training, whatever the
            batch.
    """
    training = launch_for(dtype, width, rope, device)
    size = max(16, _power_of_two(rows)) if rows is not None else training.forward.rows
    if size >= training.forward.rows or dtype.itemsize != 2:
        return training.forward, training.warps
    limit, hopper = shared_memory(device)
    key_bytes = (width + rope) * dtype.itemsize
    result_bytes = 0 if hopper else width * 4
    for blocks in _FEW_ROWS[size]:
        # Products of few rows read keys through registers, so the block in use has no place.
        streamed = max(blocks.stages - 1, 1) * blocks.keys * key_bytes
        row_bytes = key_bytes + result_bytes + blocks.keys * dtype.itemsize
        if blocks.rows * row_bytes + streamed <= limit:
            return blocks, training.warps
    return training.forward, training.warps


def tiles_for(rows: int, heads: int, tokens: int, max_query_length: int, block_rows: int) -> Tiles:
    """The tiles of a batch.

    Args:
        rows: Requests, R.
        heads: N.
        tokens: Length of the token axis, T.
        max_query_length: Of any row.
        block_rows: Heads and tokens of a program.
    """
    packed = min(_power_of_two(heads), block_rows)
    each = block_rows // packed
    most = rows if max_query_length <= each else rows + tokens // each
    return Tiles(packed, each, -(-heads // packed), most)


def splits_for(programs: int, keys: int, block_keys: int, device: torch.device) -> Splits:
    """The splits that take the least time, by a model of whole waves of programs.

    Args:
        programs: Tiles.
        keys: Of the longest row.
        block_keys: Keys that a program loads at a time.
        device: Where the kernels run.
    """
    least = max(_LEAST_SPLIT_KEYS // block_keys, 1) * block_keys
    most = max(keys // least, 1)
    processors = _processors(device)
    if device.type != "cuda":
        least, most = block_keys, max(keys // block_keys, 1)

    def cost(splits: int) -> float:
        waves = -(-programs * splits // processors)
        return waves * (keys / splits + _START_KEYS) + splits * _MERGE_KEYS

    best = min(range(1, min(most, max(processors // programs, 4)) + 1), key=cost)
    slack = min(_MOST_SLACK, max(_MOST_SLACK * processors // (programs * best), 1))
    return Splits(min(most, best * slack), programs * best, least)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
