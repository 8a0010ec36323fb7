"""Query tiles of the multi-head (MHA) forward: 128 queries of a head and their keys; scheduler."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.triton_private import aggregate

# Queries of a role: the M of a warpgroup's product.
ROWS = gl.constexpr(64)
# Queries of a tile.
QUERIES = gl.constexpr(128)
# Keys of a block; a program goes through a tile's keys block by block.
BLOCK = gl.constexpr(128)
# Integers in a row of the table that ``query_tiles`` in tiles.py makes.
_TABLE_COLUMNS = gl.constexpr(5)


@aggregate
class MultiHeadTile:
    """Which queries and keys a program works on; see ``query_tiles`` in tiles.py.

    Attributes:
        query_start, query_end: Its queries; the last tile of a sequence has fewer than the rest.
        key_start: First key that any of them sees.
        keys: How many these are.
        offset: Query i of the tile sees its keys 0 .. i + offset.
        batch: Entry of the batch.
        head: The head.
    """

    query_start: gl.tensor
    query_end: gl.tensor
    key_start: gl.tensor
    keys: gl.tensor
    offset: gl.tensor
    batch: gl.tensor
    head: gl.tensor

    @gluon.jit
    def count_blocks(self):
        """Blocks of keys. A tile without keys has one, which is hidden from all queries."""
        return gl.maximum((self.keys + BLOCK - 1) // BLOCK, 1)

    @gluon.jit
    def open_blocks(self, HALF: gl.constexpr):
        """How many blocks, from the first on, all queries of a half see all of."""
        seen = gl.minimum(self.keys, self.offset + HALF * ROWS + 1)
        return gl.maximum(seen, 0) // BLOCK

    @gluon.jit
    def hide(self, s, block, HALF: gl.constexpr, layout: gl.constexpr, window):
        """Set the scores [64, 128] of keys that a query of a half does not see to -inf.

        ``window`` is the number of keys that a query sees, or None where none is too old.
        """
        key = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
        query = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        # Negative where a query sees none.
        last = gl.minimum(query + self.offset, self.keys - 1)
        seen = key[None, :] <= last[:, None]
        if window is not None:
            seen = seen & (key[None, :] > (query + self.offset - window)[:, None])
        return gl.where(seen, s, -float("inf"))

    @gluon.jit
    def rows(self, HALF: gl.constexpr, works, layout: gl.constexpr):
        """Where a half's queries are in [S_q, B, N], int32 [64], and which are in the tile."""
        query = self.query_start + HALF * ROWS + gl.arange(0, ROWS, layout)
        index = query * works.groups + self.batch * works.heads + self.head
        return index, query < self.query_end


@aggregate
class TileScheduler:
    """Persistent tile scheduler: works, one tile of one group (a head of an entry of the batch).

    Works are numbered such that programs which run at one time read the keys and values of few
    groups, which stay in the L2 cache, and that of these the longest tiles come first. A program
    does the works ``program`` and ``2 * programs - 1 - program`` and then draws.

    Attributes:
        tiles: Pointer to int32 [tiles, 5], contiguous.
        drawn: Pointer to an int32, 0 at launch: how many works have been drawn.
        total: Tiles times groups.
        section: How many groups are worked on at one time.
        section_works: Tiles times ``section``.
        groups: B * N.
        heads: N.
    """

    tiles: gl.tensor
    drawn: gl.tensor
    total: gl.tensor
    section: gl.tensor
    section_works: gl.tensor
    groups: gl.tensor
    heads: gl.tensor

    @gluon.jit
    def second(self):
        """The second work of the program."""
        return 2 * gl.num_programs(0) - 1 - gl.program_id(0)

    @gluon.jit
    def draw(self):
        """Another one; not less than ``total`` when all are done."""
        return 2 * gl.num_programs(0) + gl.atomic_add(self.drawn, 1, sem="relaxed")

    @gluon.jit
    def tile(self, work):
        """The tile of a work, or any tile where there is no such work."""
        work = gl.where(work < self.total, work, 0)
        first = work // self.section_works * self.section
        # The last section may have fewer.
        section = gl.minimum(self.section, self.groups - first)
        inside = work % self.section_works
        group = first + inside % section
        row = self.tiles + inside // section * _TABLE_COLUMNS
        key_start, key_end = gl.load(row + 2), gl.load(row + 3)
        return MultiHeadTile(
            gl.load(row),
            gl.load(row + 1),
            key_start,
            key_end - key_start,
            gl.load(row + 4),
            group // self.heads,
            group % self.heads,
        )
