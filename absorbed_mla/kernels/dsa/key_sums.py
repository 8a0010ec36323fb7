"""What keys get from all entries of lists, added up in a fixed order.

The entries of one key, found by a stable sort, are added in the order of the tiles: the sum is the
same in every run, which sums by atomics are not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.dsa.key_lists import KEY_MASK, KeyLists

# Numbers in a buffer: 1 GiB.
_MOST_ELEMENTS = 2**28
_COLUMNS, _ROWS = 64, 16


def tiles_at_a_time(tiles: int, elements: int, most: int | None = None) -> Iterator[slice]:
    """Tiles in runs whose buffer has at most so many numbers (by default 1 GiB), or single ones.

    Args:
        tiles: How many there are.
        elements: Numbers in the buffer of one.
        most: In the buffer of a run.
    """
    step = max(1, (most or _MOST_ELEMENTS) // max(1, elements))
    for first in range(0, tiles, step):
        yield slice(first, min(first + step, tiles))


def add_in_order(
    total: Tensor, parts: Tensor, lists: KeyLists, tiles: slice, head_blocks: int
) -> None:
    """Add the parts of every key to its total, in the order of the tiles.

    Args:
        total: fp32 [S_k, B, W], contiguous, changed in place.
        parts: fp32 [tiles * B * L * head_blocks, W]; where there is no key, anything.
        lists: The keys.
        tiles: Of the lists.
        head_blocks: Parts of an entry.
    """
    keys, batch, width = total.shape
    if not total.numel() or not parts.numel():
        return
    entries, device = lists.entries[tiles], total.device
    there = torch.arange(entries.shape[2], device=device) < lists.counts[tiles].unsqueeze(-1)
    number = entries if lists.tokens == 1 else entries & KEY_MASK.value
    number = number * batch + torch.arange(batch, device=device, dtype=torch.int32)[:, None]
    # Behind all keys, where nobody reads.
    number = torch.where(there & (entries >= 0), number, keys * batch)
    ordered, order = number.flatten().sort(stable=True)
    every = torch.arange(keys * batch + 1, device=device, dtype=ordered.dtype)
    starts = torch.searchsorted(ordered, every)
    _sum_kernel[(keys * batch, triton.cdiv(width, _COLUMNS))](
        total,
        parts,
        order,
        starts,
        width,
        head_blocks,
        COLUMNS=_COLUMNS,
        ROWS=_ROWS,
        num_warps=4,
    )


@triton.jit
def _sum_kernel(
    total_ptr,
    parts_ptr,
    order_ptr,
    starts_ptr,
    width,
    head_blocks,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Some columns of one key."""
    key = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first, last = tl.load(starts_ptr + key) * head_blocks, tl.load(starts_ptr + key + 1)
    last *= head_blocks
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for start in range(first, last, ROWS):
        part = start + tl.arange(0, ROWS)
        inside = part < last
        entry = tl.load(order_ptr + part // head_blocks, mask=inside, other=0)
        row = entry * head_blocks + part % head_blocks
        pointers = parts_ptr + row[:, None] * width + column[None, :]
        mask = inside[:, None] & (column < width)[None, :]
        total += tl.load(pointers, mask=mask, other=0.0)
    result = total_ptr + key * width + column
    mask = column < width
    found = tl.load(result, mask=mask, other=0.0)
    tl.store(result, found + tl.reduce(total, 0, tl.standard._sum_combine), mask=mask)
