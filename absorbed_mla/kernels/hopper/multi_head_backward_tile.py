"""Key tiles of the multi-head (MHA) backward: 128 keys of a head, queries that attend to them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.triton_private import aggregate

# Keys of a tile: 64, the M of a warpgroup's product, for each of two warpgroups.
KEYS = gl.constexpr(128)
# Queries of a block; a program goes through its queries block by block.
QUERIES = gl.constexpr(64)
# Integers in a row of the table that ``key_tiles`` in tiles.py makes.
_TABLE_COLUMNS = gl.constexpr(6)


@aggregate
class KeyTile:
    """Which keys and queries a program works on; see ``key_tiles`` in tiles.py.

    Blocks of queries are counted from the first query of all, so that every program divides the
    queries alike.

    Attributes:
        key_start: First of its keys.
        keys: How many these are, at most 128.
        query_start, query_end: Queries that see any of them.
        first: First query of the first block.
        blocks: How many blocks of queries there are, at least one.
        offset: Query i, from query_start on, sees keys 0 .. i + offset of the tile.
        buffer: Where the gradients of its keys go.
        batch: Entry of the batch.
        head: The head.
    """

    key_start: gl.tensor
    keys: gl.tensor
    query_start: gl.tensor
    query_end: gl.tensor
    first: gl.tensor
    blocks: gl.tensor
    offset: gl.tensor
    buffer: gl.tensor
    batch: gl.tensor
    head: gl.tensor

    @gluon.jit
    def has_others(self, block):
        """Whether any query of a block is not the tile's."""
        first = self.first + block * QUERIES
        return (first < self.query_start) | (first + QUERIES > self.query_end)

    @gluon.jit
    def hides_some(self, block, window):
        """Whether any query of a block does not see any of the 128 keys.

        ``window`` is the number of keys that a query sees, or None where none is too old.
        """
        first = self.first + block * QUERIES
        past_diagonal = first - self.query_start + self.offset < KEYS - 1
        hides = self.has_others(block) | past_diagonal | (self.keys < KEYS)
        if window is not None:
            hides = hides | (first + QUERIES - self.query_start + self.offset > window)
        return hides

    @gluon.jit
    def hide(self, s, block, layout: gl.constexpr, window):
        """Set the scores [128, 64] of keys that a query of a block does not see to -inf."""
        key = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
        query = self.first + block * QUERIES + gl.arange(0, QUERIES, gl.SliceLayout(0, layout))
        inside = (query >= self.query_start) & (query < self.query_end)
        last = gl.minimum(query - self.query_start + self.offset, self.keys - 1)
        last = gl.where(inside, last, -1)
        seen = key[:, None] <= last[None, :]
        if window is not None:
            newer = query - self.query_start + self.offset - window
            seen = seen & (key[:, None] > newer[None, :])
        return gl.where(seen, s, -float("inf"))


@gluon.jit
def read_tile(tiles, query_blocks):
    """The program's tile: tiles vary fastest, so that neighbours read the same queries.

    Args:
        tiles: int32 [tiles, 6], contiguous.
        query_blocks: S_q / 64, rounded up.
    """
    row = tiles + gl.program_id(0) * _TABLE_COLUMNS
    key_start, key_end = _read(row), _read(row + 1)
    query_start, query_end = _read(row + 2), _read(row + 3)
    # A tile that no query sees has a block all the same, which is hidden from it.
    block = gl.minimum(query_start // QUERIES, query_blocks - 1)
    blocks = (query_end + QUERIES - 1) // QUERIES - block
    return KeyTile(
        key_start,
        key_end - key_start,
        query_start,
        query_end,
        block * QUERIES,
        gl.maximum(blocks, 1),
        _read(row + 4),
        _read(row + 5),
        gl.program_id(2),
        gl.program_id(1),
    )


@gluon.jit
def _read(pointer):
    """A number of the table, of which ptxas then knows that all threads have the same."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;",
        "=r,r",
        [gl.load(pointer)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
