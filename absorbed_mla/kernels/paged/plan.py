"""Block sizes, tiles and bounds of the paged kernels, from numbers that the host knows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from absorbed_mla.kernels.triton.launch import Blocks, launch_for, shared_memory

# With few heads and one token the products are small and memory is what takes time: few rows, whose
# products each warp does for keys of its own. 16 rows take so little shared memory that two
# programs fit on a multiprocessor: one's copies run while the other computes (an H200: 350 us
# instead of 381 for 128 requests of 8192 keys). More rows go as in training.
_FEW_ROWS: dict[int, tuple[Blocks, ...]] = {
    16: (Blocks(16, 64, 2), Blocks(16, 32, 2), Blocks(16, 16, 2), Blocks(16, 16, 1)),
    32: (Blocks(32, 64, 3), Blocks(32, 32, 3), Blocks(32, 16, 3), Blocks(32, 16, 1)),
}
_LEAST_PART_KEYS = 256
# Parts that rows may have beyond their first, in programs that run at a time. The grid has room for
# all of them; programs without work end at once.
_MORE_PARTS = 2
# So many times the programs that run at a time keep the device busy however unequal they are.
_ENOUGH = 8
# The interpreter has one; so few make it split.
_INTERPRETED_PROCESSORS = 4


class Tiles(NamedTuple):
    """How queries are cut into the tiles that programs work on.

    Attributes:
        heads: Heads in a tile, a power of two; those beyond N are idle.
        tokens: Tokens of one row in a tile.
        head_blocks: Tiles for all heads of a token.
        most: No batch of these shapes has more tiles of tokens.
        row_tokens: No row has more tokens.
    """

    heads: int
    tokens: int
    head_blocks: int
    most: int
    row_tokens: int


class Cut(NamedTuple):
    """Within what bounds keys may be cut into parts, each of a program of its own.

    Attributes:
        more: Parts that all tiles together have beyond their first ones, at most.
        programs: How many run at a time.
        least: Blocks of keys in a part, unless there are no more.
        fixed: Into how many parts every row is cut, or 0 for what takes the least time.
    """

    more: int
    programs: int
    least: int
    fixed: int


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
    for blocks in _FEW_ROWS[size]:
        if _few_rows_bytes(blocks, width, rope, dtype, hopper) <= limit:
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
    return Tiles(packed, each, -(-heads // packed), most, max_query_length)


def cut_for(
    tiles: Tiles,
    keys: int,
    block_keys: int,
    resident: int,
    device: torch.device,
    parts: int | None = None,
) -> Cut:
    """What the device may do when it cuts the rows of a batch, see ``schedule``.

    Args:
        tiles: Of the batch.
        keys: Of the longest row.
        block_keys: Keys that a program loads at a time.
        resident: Programs that run on a multiprocessor at a time.
        device: Where the kernels run.
        parts: Of every row; None for what takes the least time.
    """
    at_a_time = _processors(device) * resident
    least = max(_LEAST_PART_KEYS // block_keys, 1) if device.type == "cuda" else 1
    if parts is not None:
        return Cut(tiles.most * (parts - 1), at_a_time, least, parts)
    most = max(-(-keys // block_keys) // least, 1)
    more = min(_MORE_PARTS * -(-at_a_time // tiles.head_blocks), tiles.most * (most - 1))
    enough = tiles.most * tiles.head_blocks >= _ENOUGH * at_a_time
    return Cut(0 if enough else more, at_a_time, least, 0)


def resident(
    blocks: Blocks, width: int, rope: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Programs that run on a multiprocessor at a time.

    Args:
        blocks: Of the portable kernel.
        width: C.
        rope: R.
        dtype: Of the operands.
        device: Where the kernels run.
    """
    limit, hopper = shared_memory(device)
    # More rows than the fewest fill the registers.
    small = blocks.rows == min(_FEW_ROWS)
    return 2 if small and 2 * _few_rows_bytes(blocks, width, rope, dtype, hopper) <= limit else 1


def _few_rows_bytes(blocks: Blocks, width: int, rope: int, dtype: torch.dtype, hopper: bool) -> int:
    """Shared memory of a program of the portable kernel that has few rows."""
    # Its products read keys through registers: the block in use has no place here.
    key_bytes = (width + rope) * dtype.itemsize
    streamed = max(blocks.stages - 1, 1) * blocks.keys * key_bytes
    result_bytes = 0 if hopper else width * 4
    return blocks.rows * (key_bytes + result_bytes + blocks.keys * dtype.itemsize) + streamed


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
