"""Device functions of the sparse kernels: which rows a tile has, which keys a block has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_rows(first, queries, heads, head_blocks, TOKENS: tl.constexpr, HB: tl.constexpr):
    """The rows of a program's tile; a row is a head of a token.

    Args:
        first: Number of the launch's first tile.
        queries: S_q.
        heads: N.
        head_blocks: Tiles for all heads of a token; they vary fastest over programs.
        TOKENS: Of a tile.
        HB: Heads of a tile.

    Returns:
        The tile's number, and for each row [TOKENS * HB] the token on the query axis and the head
        (int64), the number of the token in the tile, and whether there is such a row.
    """
    tile = first + tl.program_id(0) // head_blocks
    row = tl.arange(0, TOKENS * HB)
    own = row // HB
    token = tile * TOKENS + own
    head = (tl.program_id(0) % head_blocks) * HB + row % HB
    return tile, token.to(tl.int64), head.to(tl.int64), own, (token < queries) & (head < heads)


@triton.jit
def listed_keys(list_ptr, start, count, own, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """A block of a list of keys.

    Args:
        list_ptr: The tile's entries.
        start: First of the block.
        count: Entries of the list.
        own: Number of each row's token in the tile, [rows].
        TOKENS: Of a tile.
        BLOCK_N: Keys of a block.

    Returns:
        The keys on the key axis, int64 [BLOCK_N]; whether there are such; and which row sees which,
        [rows, BLOCK_N].
    """
    return keys_of_entries(list_entries(list_ptr, start, count, BLOCK_N), own, TOKENS)


@triton.jit
def list_entries(list_ptr, start, count, BLOCK_N: tl.constexpr):
    """A block of a list of keys as it lies there, int32 [BLOCK_N]; negative behind its end."""
    place = start + tl.arange(0, BLOCK_N)
    return tl.load(list_ptr + place, mask=place < count, other=-1)


@triton.jit
def keys_of_entries(entry, own, TOKENS: tl.constexpr):
    """What :func:`listed_keys` returns, of entries [BLOCK_N]."""
    there = entry >= 0
    if TOKENS == 1:
        seen = there[None, :] & (own >= 0)[:, None]
    else:
        seen = (tl.maximum(entry, 0)[None, :] >> (own + 27)[:, None]) & 1 != 0
        entry = entry & 0x7FFFFFF
    return tl.where(there, entry, 0).to(tl.int64), there, seen
