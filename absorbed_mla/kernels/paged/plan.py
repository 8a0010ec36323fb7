"""Block sizes, tiles and split-KV bounds of the paged kernels, from numbers known on the host."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from absorbed_mla.kernels.triton.launch import Blocks, launch_for, shared_memory

# With few heads and one token the products are small and loading keys takes the time: tiles have
# few rows, and each warp multiplies keys of its own. With 16 rows two programs fit into the shared
# memory of a multiprocessor, and one copies while the other computes (an H200: 350 us instead of
# 381 for 128 requests of 8192 keys). Tiles of more rows are those of training.
_FEW_ROWS: dict[int, tuple[Blocks, ...]] = {
    16: (Blocks(16, 64, 2), Blocks(16, 32, 2), Blocks(16, 16, 2), Blocks(16, 16, 1)),
    32: (Blocks(32, 64, 3), Blocks(32, 32, 3), Blocks(32, 16, 3), Blocks(32, 16, 1)),
}
# FP8 rows are scaled in registers, where the next ones wait, and lie in shared memory as operands
# only: with fewer keys at a time two programs fit, and hardly a register is spilled. (As compiled
# for an H200; not measured.)
_FP8_ROWS: dict[int, tuple[Blocks, ...]] = {
    16: (Blocks(16, 32, 1), Blocks(16, 16, 1)),
    32: (Blocks(32, 32, 1), Blocks(32, 16, 1)),
    64: (Blocks(64, 32, 1), Blocks(64, 16, 1)),
}
_MIN_SPLIT_KEYS = 256
# This many times the programs that run at a time keep the device busy, a tile each, even if the
# requests are unequal.
_ENOUGH = 8
# Of a multiprocessor.
_REGISTERS = 65536
# Assumed in Triton's interpreter; so few that it splits too.
_INTERPRETED_PROCESSORS = 4


class Tiles(NamedTuple):
    """Tiles of queries that programs work on. A row of a tile is a head of a token.

    Attributes:
        heads: Heads in a tile, a power of two; those beyond N are idle.
        tokens: Tokens of one request in a tile.
        head_blocks: Tiles for all heads of a token.
        max_tiles: Maximum tiles of tokens of any batch of these shapes.
        max_tokens: Maximum new tokens of a request.
    """

    heads: int
    tokens: int
    head_blocks: int
    max_tiles: int
    max_tokens: int


class SplitKV(NamedTuple):
    """Bounds of split-KV: the keys of a tile may be in several parts of the work.

    Attributes:
        parts: Maximum parts. A part has a program for each of the tiles for all heads of a token.
        programs: Programs that run at a time.
        min_blocks: Minimum blocks of keys in a part, where there are that many.
        num_splits: Splits of every request, each a part; 0: the device chooses (``split_kv.py``);
            negative: a split for every so many blocks of keys.
    """

    parts: int
    programs: int
    min_blocks: int
    num_splits: int

    @property
    def splits(self) -> bool:
        """Whether a tile can be in several parts."""
        return self.num_splits != 1


class Division(NamedTuple):
    """How the work of a batch is divided, as far as the host knows it.

    Attributes:
        tiles: Of the queries.
        split_kv: Bounds of the parts.
        block_keys: Keys that a program loads at a time.
        window: Keys in the cache that a token may see, at most.
    """

    tiles: Tiles
    split_kv: SplitKV
    block_keys: int
    window: int


def window_of(max_kv_length: int, key_start: int, key_end: int | None) -> int:
    """Keys from ``key_start`` to ``key_end`` of the longest request; None: to its last."""
    end = max_kv_length if key_end is None else min(key_end, max_kv_length)
    return max(end - key_start, 0)


@functools.lru_cache(maxsize=256)
def blocks_for(
    dtype: torch.dtype,
    kv_lora_rank: int,
    rope: int,
    device: torch.device,
    rows: int | None,
    fp8: bool = False,
) -> tuple[Blocks, int]:
    """Block sizes and warps.

    Args:
        dtype: Of the operands.
        kv_lora_rank: C.
        rope: R.
        device: Where the kernels run.
        rows: Heads times tokens of the longest request; None for the blocks of training, whatever
            the batch.
        fp8: Whether the cache has FP8 rows.
    """
    training = launch_for(dtype, kv_lora_rank, rope, device)
    if rows is None or dtype.itemsize != 2:
        return training.forward, training.warps
    size = min(max(16, power_of_two(rows)), training.forward.rows)
    choices = _FP8_ROWS[size] if fp8 else _FEW_ROWS.get(size, ())
    if size == training.forward.rows and not fp8:
        return training.forward, training.warps
    limit, hopper = shared_memory(device)
    for blocks in choices:
        if _few_rows_bytes(blocks, kv_lora_rank, rope, dtype, hopper) <= limit:
            return blocks, training.warps
    return training.forward, training.warps


def tiles_for(
    requests: int, heads: int, tokens: int, max_query_length: int, block_rows: int
) -> Tiles:
    """The tiles of a batch.

    Args:
        requests: Q.
        heads: N.
        tokens: T.
        max_query_length: Maximum new tokens of a request.
        block_rows: Rows of a tile, heads times tokens.
    """
    packed = min(power_of_two(heads), block_rows)
    each = block_rows // packed
    max_tiles = requests if max_query_length <= each else requests + tokens // each
    return Tiles(packed, each, -(-heads // packed), max_tiles, max_query_length)


def split_kv_for(
    tiles: Tiles,
    keys: int,
    block_keys: int,
    resident: int,
    device: torch.device,
    num_splits: int | None = None,
) -> SplitKV:
    """The bounds within which the device divides the work of a batch, see ``schedule``.

    Args:
        tiles: Of the batch.
        keys: Of the longest request.
        block_keys: Keys that a program loads at a time.
        resident: Programs that run on a multiprocessor at a time.
        device: Where the kernels run.
        num_splits: Splits of every request, or as in ``SplitKV``; None: the device chooses.
    """
    concurrent = processors(device) * resident
    min_blocks = max(_MIN_SPLIT_KEYS // block_keys, 1) if device.type == "cuda" else 1
    if num_splits is None and tiles.max_tiles * tiles.head_blocks >= _ENOUGH * concurrent:
        num_splits = 1
    if num_splits is not None:
        each = num_splits if num_splits > 0 else -(-keys // (-num_splits * block_keys))
        return SplitKV(tiles.max_tiles * each, concurrent, min_blocks, num_splits)
    most = max(-(-keys // block_keys) // min_blocks, 1)
    parts = min(max(concurrent // tiles.head_blocks, 1), tiles.max_tiles * most)
    return SplitKV(parts, concurrent, min_blocks, 0)


def resident(
    blocks: Blocks, kv_lora_rank: int, rope: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Programs that run on a multiprocessor at a time.

    Args:
        blocks: Of the ``triton`` kernel.
        kv_lora_rank: C.
        rope: R.
        dtype: Of the operands.
        device: Where the kernels run.
    """
    limit, hopper = shared_memory(device)
    # Tiles of more rows fill the registers.
    small = blocks.rows == min(_FEW_ROWS)
    return (
        2
        if small and 2 * _few_rows_bytes(blocks, kv_lora_rank, rope, dtype, hopper) <= limit
        else 1
    )


def most_registers(resident: int, warps: int) -> int | None:
    """Registers that a thread may have so that several programs fit; None: any that there are.

    Args:
        resident: Programs that run on a multiprocessor at a time.
        warps: Of each.
    """
    return _REGISTERS // (resident * warps * 32) if resident > 1 else None


def _few_rows_bytes(
    blocks: Blocks, kv_lora_rank: int, rope: int, dtype: torch.dtype, hopper: bool
) -> int:
    """Shared memory of a program of the ``triton`` kernel whose tile has few rows."""
    # Its products read keys from registers: the block in use takes no shared memory.
    key_bytes = (kv_lora_rank + rope) * dtype.itemsize
    streamed = max(blocks.stages - 1, 1) * blocks.keys * key_bytes
    result_bytes = 0 if hopper else kv_lora_rank * 4
    return blocks.rows * (key_bytes + result_bytes + blocks.keys * dtype.itemsize) + streamed


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few where kernels are interpreted."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(number: int) -> int:
    """The smallest that is not less than ``number``; Triton's own costs the host more."""
    return 1 << max(number - 1, 0).bit_length()
