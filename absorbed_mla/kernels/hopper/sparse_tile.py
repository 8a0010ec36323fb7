"""A tile of the sparse kernels: 64 rows of one or more tokens, and the list of their keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.dsa import key_lists
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS, Tile
from absorbed_mla.kernels.triton_private import aggregate

_KEY_BITS = gl.constexpr(key_lists.KEY_BITS.value)
_KEY_MASK = gl.constexpr(key_lists.KEY_MASK.value)


@aggregate
class SparseTile(Tile):
    """A tile of up to 64 rows whose keys are those of a list.

    Attributes:
        entries: Pointer to the list, see key_lists.py.
        number: Of the list.
        open_keys: How many entries, from the first on, all rows see.
    """

    entries: gl.tensor
    number: gl.tensor
    open_keys: gl.tensor

    @gluon.jit
    def listed(self, block, layout: gl.constexpr):
        """The entries of a block, int32 [64]; negative for none."""
        place = block * KEYS + gl.arange(0, KEYS, layout)
        return gl.load(self.entries + place, mask=place < self.keys, other=-1)

    @gluon.jit
    def sees(self, block, layout: gl.constexpr):
        """As ``CausalTile.sees``."""
        entry = self.listed(block, gl.SliceLayout(0, layout))[None, :]
        token = (gl.arange(0, ROWS, gl.SliceLayout(1, layout)) // self.HEADS)[:, None]
        if self.HEADS == ROWS:
            return (entry >= 0) & (token >= 0)
        return (entry >= 0) & ((((entry >> _KEY_BITS) >> token) & 1) != 0)

    @gluon.jit
    def open_blocks(self):
        """As ``CausalTile.open_blocks``."""
        return self.open_keys // KEYS

    @gluon.jit
    def hides_some(self, block, first):
        """Whether any row does not see all of a block."""
        return block >= self.open_keys // KEYS

    @gluon.jit
    def sees_from(self, block, first, layout: gl.constexpr):
        """As ``sees``."""
        return self.sees(block, layout)


@gluon.jit
def key_of(entry, tile):
    """The keys of entries, int64, and which of these are keys; 0 for others."""
    there = entry >= 0
    if tile.HEADS != ROWS:
        entry = entry & _KEY_MASK
    return gl.where(there, entry, 0).to(gl.int64), there


@gluon.jit
def read_sparse_tile(lists, first, length, queries, batches, heads, HEADS: gl.constexpr):
    """The program's tile: heads vary fastest, so that neighbours read the same keys.

    Args:
        lists: Entries [tiles, B, L], counts and open counts [tiles, B], int32, contiguous.
        first: Number of the launch's first tile.
        length: L.
        queries: S_q.
        batches: B.
        heads: N.
        HEADS: Heads in a tile.
    """
    entries, counts, open_counts = lists
    groups = (heads + HEADS - 1) // HEADS
    program = gl.program_id(0)
    tile = first + program // (groups * batches)
    batch = program // groups % batches
    number = tile * batches + batch
    TOKENS: gl.constexpr = ROWS // HEADS
    query = tile * TOKENS
    return SparseTile(
        entries=entries + number.to(gl.int64) * length,
        number=number,
        query_start=query,
        query_end=gl.minimum(query + TOKENS, queries),
        keys=gl.load(counts + number),
        open_keys=gl.load(open_counts + number),
        batch=batch,
        head=program % groups * HEADS,
        HEADS=HEADS,
        ROWS=ROWS,
        IDLE_HEADS=True,
    )
