"""What keys get from all entries of lists, added up in a fixed order.

A table says for every key and tile where the tile's list has the key, if it has. The parts of a key
are added in the order of the tiles: the sum is the same in every run, which sums by atomics are
not. Parts of bf16 operands are rounded to bf16 before they are added in fp32: with independent
errors that is the error of one rounding of the sum, and half of the memory traffic.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.dsa.key_lists import KEY_MASK, KeyLists

# Numbers in a buffer: 1 GiB in fp32.
_MOST_ELEMENTS = 2**28
_COLUMNS, _ROWS, _ENTRIES = 64, 32, 1024


def parts_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the parts that operands of this dtype give: fp16 has not the range of a gradient."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def tiles_at_a_time(tiles: int, elements: int, most: int | None = None) -> Iterator[slice]:
    """Tiles in runs whose buffer has at most so many numbers (by default 2^28), or single ones.

    Args:
        tiles: How many there are.
        elements: Numbers in the buffer of one.
        most: In the buffer of a run.
    """
    step = max(1, (most or _MOST_ELEMENTS) // max(1, elements))
    for first in range(0, tiles, step):
        yield slice(first, min(first + step, tiles))


def parts_of_tiles(
    tiles: int, rows: int, width: int, like: Tensor, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """Runs of tiles, and for each a buffer of their parts.

    All are views of the first, which is the longest: with deterministic algorithms PyTorch fills
    every new one with NaN, which would take half as long as to write the parts.

    Args:
        tiles: How many there are.
        rows: Parts of one.
        width: Of a part.
        like: A tensor on the device.
        dtype: Of the parts.
    """
    buffer: Tensor | None = None
    for some in tiles_at_a_time(tiles, rows * width):
        count = (some.stop - some.start) * rows
        if buffer is None:
            buffer = like.new_empty(count, width, dtype=dtype)
        yield some, buffer[:count]


def add_in_order(
    total: Tensor, parts: Tensor, lists: KeyLists, tiles: slice, head_blocks: int
) -> None:
    """Add the parts of every key to its total, in the order of the tiles.

    Args:
        total: fp32 [S_k, B, W], contiguous, changed in place.
        parts: [tiles * B * L * head_blocks, W]; where there is no key, anything.
        lists: The keys.
        tiles: Of the lists.
        head_blocks: Parts of an entry.
    """
    keys, batch, width = total.shape
    if not total.numel() or not parts.numel():
        return
    entries, counts = lists.entries[tiles], lists.counts[tiles]
    count, _, length = entries.shape
    # Where the parts of every key are, by tile.
    places = entries.new_full((keys * batch, count), -1)
    _place_kernel[(count, batch)](
        entries,
        counts,
        places,
        length,
        MASK=KEY_MASK.value if lists.tokens > 1 else 2**31 - 1,
        ENTRIES=_ENTRIES,
        num_warps=4,
    )
    _sum_kernel[(keys * batch, triton.cdiv(width, _COLUMNS))](
        total,
        parts,
        places,
        count,
        width,
        head_blocks,
        COLUMNS=_COLUMNS,
        ROWS=_ROWS,
        num_warps=4,
    )


@triton.jit
def _place_kernel(
    entries_ptr, counts_ptr, places_ptr, length, MASK: tl.constexpr, ENTRIES: tl.constexpr
):
    """The entries of one list."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    batch, batches = tl.program_id(1), tl.num_programs(1)
    number = tile * batches + batch
    first = number.to(tl.int64) * length
    count = tl.load(counts_ptr + number)
    for start in range(0, count, ENTRIES):
        place = start + tl.arange(0, ENTRIES)
        entry = tl.load(entries_ptr + first + place, mask=place < count, other=-1)
        row = (entry & MASK).to(tl.int64) * batches + batch
        tl.store(places_ptr + row * tiles + tile, number * length + place, mask=entry >= 0)


@triton.jit
def _sum_kernel(
    total_ptr,
    parts_ptr,
    places_ptr,
    tiles,
    width,
    head_blocks,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Some columns of one key."""
    key = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for start in range(0, tiles, ROWS):
        tile = start + tl.arange(0, ROWS)
        place = tl.load(places_ptr + key * tiles + tile, mask=tile < tiles, other=-1)
        mask = (place >= 0)[:, None] & inside[None, :]
        for block in range(head_blocks):
            row = place.to(tl.int64) * head_blocks + block
            pointers = parts_ptr + row[:, None] * width + column[None, :]
            total += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    result = total_ptr + key * width + column
    found = tl.load(result, mask=inside, other=0.0)
    tl.store(result, found + tl.reduce(total, 0, tl.standard._sum_combine), mask=inside)
