"""A forward program's part of the work: its rows, their keys, and where its results go."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Gluon has no public name for it in Triton 3.6 and 3.7; its own examples import it like this.
from triton.language.core import _aggregate as aggregate

ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)


@aggregate
class Tile:
    """Which rows and keys a program works on; see ``query_tiles`` in tiles.py.

    Attributes:
        query_start, query_end: Its tokens; the last tile of a sequence has fewer than the rest.
        key_start: First key.
        keys: How many there are.
        offset: Query i of the tile sees its keys 0 .. i + offset.
        batch: Entry of the batch.
        head: First head.
        HEADS: Heads per token. Row r is token r // HEADS and head r % HEADS.
    """

    query_start: gl.tensor
    query_end: gl.tensor
    key_start: gl.tensor
    keys: gl.tensor
    offset: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    HEADS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, query_start, query_end, key_start, keys, offset, batch, head, HEADS):
        self.query_start = query_start
        self.query_end = query_end
        self.key_start = key_start
        self.keys = keys
        self.offset = offset
        self.batch = batch
        self.head = head
        self.HEADS = gl.constexpr(HEADS)

    @gluon.jit
    def blocks(self):
        """Blocks of keys. A tile without keys has one, which is hidden from all rows."""
        return gl.maximum((self.keys + KEYS - 1) // KEYS, 1)

    @gluon.jit
    def open_blocks(self):
        """How many blocks, from the first on, all rows see all of."""
        return gl.maximum(gl.minimum(self.keys, self.offset + 1), 0) // KEYS

    @gluon.jit
    def last_keys(self, layout: gl.constexpr):
        """The last key that each row sees, [64] int32, negative where it sees none."""
        token = gl.arange(0, ROWS, layout) // self.HEADS
        return gl.minimum(token + self.offset, self.keys - 1)

    @gluon.jit
    def rows(self, batches, heads, layout: gl.constexpr):
        """Where the rows are in [S_q, B, N], [64] int64, and which of them are in the tile."""
        row = gl.arange(0, ROWS, layout)
        query = self.query_start + row // self.HEADS
        index = (query.to(gl.int64) * batches + self.batch) * heads + self.head + row % self.HEADS
        return index, query < self.query_end


@gluon.jit
def read_tile(tiles, batches, heads, HEADS: gl.constexpr):
    """The program's tile: heads vary fastest, so that neighbours read the same keys."""
    groups = heads // HEADS
    program = gl.program_id(0)
    row = tiles + program // (groups * batches) * 5
    key_start = gl.load(row + 2)
    return Tile(
        gl.load(row),
        gl.load(row + 1),
        key_start,
        gl.load(row + 3) - key_start,
        gl.load(row + 4),
        program // groups % batches,
        program % groups * HEADS,
        HEADS,
    )


@gluon.constexpr_function
def _store_layout(columns):
    """The accumulator's rows, but four neighbouring columns in a thread: whole sectors of 32 B."""
    registers = [[0, 1], [0, 2], [8, 0]]
    registers += [[0, 1 << bit] for bit in range(4, columns.bit_length() - 1)]
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def store_half(out, tile, o, batches, heads, first: gl.constexpr):
    """Write columns from ``first`` on of the tile's rows."""
    HALF: gl.constexpr = o.shape[1]
    layout: gl.constexpr = _store_layout(HALF)
    index, inside = tile.rows(batches, heads, gl.SliceLayout(1, layout))
    column = first + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    values = gl.convert_layout(o.to(out.dtype.element_ty), layout)
    gl.store(out + (index * (2 * HALF))[:, None] + column[None, :], values, mask=inside[:, None])
