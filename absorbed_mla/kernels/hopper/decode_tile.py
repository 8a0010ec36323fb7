"""A tile of the decode kernel: tokens of one row of the batch, heads, and a part of their keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate  # as in tile.py

from absorbed_mla.kernels.hopper.tile import KEYS, ROWS

# Integers in a row of the table that ``schedule`` of paged/schedule.py makes.
_TABLE_COLUMNS = gl.constexpr(5)


@aggregate
class DecodeTile:
    """Which rows and keys a program works on. Keys are counted from the first one in the cache.

    Attributes:
        row: Of the batch; the row of the table of blocks.
        query_start, query_end: Tokens on the token axis; none where there is nothing to do.
        key_start: First key of the part, a multiple of ``KEYS``.
        keys: How many the part has that any of the tokens sees; 0 or fewer: none.
        offset: Token i of the tile sees the part's keys 0 .. i + offset.
        part: Number of the part.
        whole: Whether there is no other part.
        head: First head.
        HEADS: Heads per token. Row r is token r // HEADS and head r % HEADS.
    """

    row: gl.tensor
    query_start: gl.tensor
    query_end: gl.tensor
    key_start: gl.tensor
    keys: gl.tensor
    offset: gl.tensor
    part: gl.tensor
    whole: gl.tensor
    head: gl.tensor
    HEADS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, row, query_start, query_end, key_start, keys, offset, part, whole, head, HEADS
    ):
        self.row = row
        self.query_start = query_start
        self.query_end = query_end
        self.key_start = key_start
        self.keys = keys
        self.offset = offset
        self.part = part
        self.whole = whole
        self.head = head
        self.HEADS = gl.constexpr(HEADS)

    @gluon.jit
    def rows(self, batches, heads, layout: gl.constexpr):
        """As ``Tile.rows``, with tokens of all rows of the batch on one axis: [T, 1, N]."""
        row = gl.arange(0, ROWS, layout)
        token = self.query_start + row // self.HEADS
        head = self.head + row % self.HEADS
        index = token.to(gl.int64) * heads + head
        return index, (token < self.query_end) & (head < heads)


@gluon.jit
def read_decode_tile(table, window, head_blocks, HEADS: gl.constexpr, SPLIT: gl.constexpr):
    """The program's tile: heads vary fastest, so that neighbours read the same keys.

    Args:
        table: int32 [tiles, 5], contiguous, see paged/schedule.py.
        window: Keys in the cache.
        head_blocks: Tiles for all heads of a token.
        HEADS: Heads in a tile.
        SPLIT: Whether keys may be in several parts; the grid's second axis.
    """
    program = gl.program_id(0)
    entry = table + program // head_blocks * _TABLE_COLUMNS
    first, tokens = gl.load(entry + 1), gl.load(entry + 2)
    seen, chunk = gl.load(entry + 3), gl.load(entry + 4)
    key_end = gl.minimum(seen + tokens - 1, window)
    part = gl.program_id(1)
    whole = True
    key_start = 0
    if SPLIT:
        whole = key_end <= chunk
        key_start = part * chunk
    part_end = gl.minimum(key_start + chunk, key_end) if SPLIT else key_end
    # The first part writes what tokens without keys get.
    tokens = gl.where((part > 0) & (key_start >= key_end), 0, tokens)
    return DecodeTile(
        gl.load(entry),
        first,
        first + tokens,
        gl.to_tensor(key_start),
        part_end - key_start,
        seen - 1 - key_start,
        part,
        gl.to_tensor(whole),
        program % head_blocks * HEADS,
        HEADS,
    )


@gluon.jit
def find_pages(tile, block, block_table, block_size, row_stride, PAGE: gl.constexpr):
    """Where the keys of a block of the tile lie in the cache.

    Args:
        tile: The tile.
        block: Of ``KEYS`` keys.
        block_table: [R, blocks of a row], int32 or int64.
        block_size: Keys in a block of the cache, a multiple of ``PAGE``.
        row_stride: Of the table.
        PAGE: Keys that lie together, a divisor of ``KEYS``.

    Returns:
        For each page the block of the cache and its first place there, int32. Pages behind the
        tile's last key are that key's: entries of the table beyond it may be anything.
    """
    entries = block_table + tile.row.to(gl.int64) * row_stride
    last = (tile.key_start + gl.maximum(tile.keys, 1) - 1) // PAGE * PAGE
    pages = ()
    for page in gl.static_range(0, KEYS, PAGE):
        key = gl.minimum(tile.key_start + block * KEYS + page, last)
        found = gl.load(entries + key // block_size).to(gl.int32), key % block_size
        pages += (found,)  # type: ignore[assignment]  # unrolled: as many as there are pages
    return pages
