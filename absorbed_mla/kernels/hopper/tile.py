"""Tiles of attention over the latent: the rows of one program, and the keys that they see."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.triton_private import aggregate

# Rows of a tile, a row being one head of one token: the M of a warpgroup's product.
ROWS = gl.constexpr(64)
# Keys of a block; a program goes through its keys block by block.
KEYS = gl.constexpr(64)
# Integers in a row of the table that ``query_tiles`` in tiles.py makes.
_TABLE_COLUMNS = gl.constexpr(5)


def tile_shape(heads: int) -> tuple[int, int]:
    """Tokens and heads whose product is ``ROWS``.

    Args:
        heads: N.

    Returns:
        How many tokens a tile has at most, and how many heads of each: the largest power of two
        that divides N, up to ``ROWS``.
    """
    packed = min(heads & -heads, ROWS.value)
    return ROWS.value // packed, packed


class Tile:
    """The rows that a program computes, and how many keys they see; which, subclasses say.

    Attributes:
        query_start, query_end: Its tokens; the last tile of a sequence has fewer than the rest.
        keys: How many keys any of them sees.
        batch: Entry of the batch.
        head: First head.
        HEADS: Heads per token. Row r is token r // HEADS and head r % HEADS.
        ROWS: How many rows there are.
        IDLE_HEADS: Whether heads of the tile may lie beyond N.
    """

    query_start: gl.tensor
    query_end: gl.tensor
    keys: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    HEADS: gl.constexpr
    ROWS: gl.constexpr
    IDLE_HEADS: gl.constexpr

    @gluon.jit
    def rows(self, batches, heads, layout: gl.constexpr):
        """Where the rows are in [S_q, B, N], int64 [ROWS], and which of them are in the tile."""
        row = gl.arange(0, self.ROWS, layout)
        query = self.query_start + row // self.HEADS
        # The terms are added in the order of which the kernels were measured.
        if self.IDLE_HEADS:
            head = self.head + row % self.HEADS
            index = (query.to(gl.int64) * batches + self.batch) * heads + head
            return index, (query < self.query_end) & (head < heads)
        index = (query.to(gl.int64) * batches + self.batch) * heads + self.head + row % self.HEADS
        return index, query < self.query_end

    @gluon.jit
    def first_top(self, layout: gl.constexpr):
        """The rows' largest scores before the first key, [ROWS]."""
        return gl.full([self.ROWS], -float("inf"), gl.float32, layout)


class CausalTile(Tile):
    """A tile whose keys lie side by side, the last of them at a causal diagonal.

    Attributes:
        key_start: First key that any of its tokens sees.
        offset: Token i of the tile sees its keys 0 .. i + offset.
    """

    key_start: gl.tensor
    offset: gl.tensor

    @gluon.jit
    def sees(self, block, layout: gl.constexpr):
        """Which row sees which key of a block, [ROWS, 64] in ``layout``."""
        key = block * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
        token = gl.arange(0, self.ROWS, gl.SliceLayout(1, layout)) // self.HEADS
        # Negative where a row sees none.
        last = gl.minimum(token + self.offset, self.keys - 1)
        return key[None, :] <= last[:, None]

    @gluon.jit
    def open_blocks(self):
        """How many blocks, from the first on, all rows see all of."""
        return gl.maximum(gl.minimum(self.keys, self.offset + 1), 0) // KEYS


@aggregate
class DenseTile(CausalTile):
    """A tile of training: see ``query_tiles`` in tiles.py.

    Attributes:
        key_end: One past the last key that any of its tokens sees.
    """

    key_end: gl.tensor

    @gluon.jit
    def hides_some(self, block, first):
        """Whether any row does not see all of the keys ``first`` to ``first + 63`` of the axis."""
        last = first + KEYS - 1
        past_diagonal = last - self.key_start > self.offset
        return (first < self.key_start) | (last >= self.key_end) | past_diagonal

    @gluon.jit
    def sees_from(self, block, first, layout: gl.constexpr):
        """Which row sees which of these keys, [64, 64]."""
        # Not self.keys: for the few blocks at an edge it would occupy a register all along.
        key = first - self.key_start + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
        token = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) // self.HEADS
        inside = (key >= 0) & (key < self.key_end - self.key_start)
        return inside[None, :] & (key[None, :] <= (token + self.offset)[:, None])


@gluon.jit
def read_tile(tiles, number, batches, heads, HEADS: gl.constexpr):
    """A tile: heads vary fastest, so that neighbours read the same keys.

    Args:
        tiles: int32 [tiles, 5], contiguous.
        number: Of the tile, among those of all entries of the batch and groups of heads.
        batches: B.
        heads: N.
        HEADS: Heads in a tile.
    """
    groups = heads // HEADS
    row = tiles + number // (groups * batches) * _TABLE_COLUMNS
    query_start, query_end = gl.load(row), gl.load(row + 1)
    key_start, key_end = gl.load(row + 2), gl.load(row + 3)
    return DenseTile(
        query_start=query_start,
        query_end=query_end,
        key_start=key_start,
        key_end=key_end,
        keys=key_end - key_start,
        offset=gl.load(row + 4),
        batch=number // groups % batches,
        head=number % groups * HEADS,
        HEADS=HEADS,
        ROWS=ROWS,
        IDLE_HEADS=False,
    )
