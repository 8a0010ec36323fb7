"""A program's part of the decode kernel's work, and its tiles: tokens, heads and keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.hopper.tile import KEYS, CausalTile
from absorbed_mla.kernels.paged.schedule import TABLE_COLUMNS
from absorbed_mla.kernels.triton_private import aggregate

_COLUMNS = gl.constexpr(TABLE_COLUMNS.value)


@aggregate
class Part:
    """The range of tiles that the program goes through, for some heads.

    It has few attributes, and tiles are read from the tables again where they are wanted again,
    because the products' registers leave room for little else.

    Attributes:
        tiles: int32 [tiles, 8], contiguous, see paged/schedule.py.
        starts: int32 [parts + 1, 2], contiguous, likewise.
        head_blocks: Tiles for all heads of a token. The program's varies fastest, so that
            neighbours read the same keys.
        HEADS: Heads in a tile.
        ROWS: Of a tile, tokens times heads.
    """

    tiles: gl.tensor
    starts: gl.tensor
    head_blocks: gl.tensor
    HEADS: gl.constexpr
    ROWS: gl.constexpr

    @gluon.jit
    def range(self):
        """The first tile, and one past the last."""
        start = self.starts + gl.program_id(0) // self.head_blocks * 2
        return gl.load(start), gl.load(start + 2) + gl.where(gl.load(start + 3) > 0, 1, 0)

    @gluon.jit
    def tile(self, index):
        """A tile, with its keys in this part.

        One whose tokens see none of these, although later ones of their request do, has no tokens.
        """
        number = gl.program_id(0) // self.head_blocks
        head_block = gl.program_id(0) % self.head_blocks
        start = self.starts + number * 2
        entry = self.tiles + index * _COLUMNS
        first, tokens, keys = gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 4)
        begin = gl.where(index == gl.load(start), gl.load(start + 1), 0) * KEYS
        last = gl.where(index == gl.load(start + 2), gl.load(start + 3) * KEYS, keys)
        tokens = gl.where((begin > 0) & (begin >= keys), 0, tokens)
        place = 2 * number + gl.where(begin == 0, 1, 0)
        return DecodeTile(
            request=gl.load(entry),
            query_start=first,
            query_end=first + tokens,
            key_start=begin,
            keys=gl.minimum(last, keys) - begin,
            offset=gl.load(entry + 3) - 1 - begin,
            place=gl.where(gl.load(entry + 5) > 1, place * self.head_blocks + head_block, -1),
            behind=gl.load(entry + 7),
            batch=gl.to_tensor(0),
            head=head_block * self.HEADS,
            HEADS=self.HEADS,
            ROWS=self.ROWS,
            IDLE_HEADS=True,
        )


@aggregate
class DecodeTile(CausalTile):
    """A tile of new tokens of a request; keys are counted from the first one in the cache.

    Tokens of all requests are on one axis, [T, 1, N]; there are none where there is nothing to do.
    Its keys are those of a part of the work, from a multiple of ``KEYS`` on; 0 or fewer: none.

    Attributes:
        request: Of the batch; its row in the table of blocks.
        place: Where the result waits for those of the other parts, counted in tiles; negative if
            there are none.
        behind: How far behind its tokens' places results lie that do not wait, in tokens.
    """

    request: gl.tensor
    place: gl.tensor
    behind: gl.tensor

    @gluon.jit
    def results(self, pointer, width):
        """Where results lie, ``width`` for a token, of the token at place 0."""
        return pointer + self.behind.to(gl.int64) * width

    @gluon.jit
    def first_top(self, layout: gl.constexpr):
        """As ``Tile.first_top``; of rows in no token so large that their probabilities are 0.

        Products with zeros take less power, which limits the speed.
        """
        token = self.query_start + gl.arange(0, self.ROWS, layout) // self.HEADS
        return gl.where(token < self.query_end, -float("inf"), 1e30)

    @gluon.jit
    def place_rows(self, layout: gl.constexpr):
        """Where the rows' results wait, int64; negative if they do not."""
        return self.place.to(gl.int64) * self.ROWS + gl.arange(0, self.ROWS, layout)

    @gluon.jit
    def is_seen(self, block, layout: gl.constexpr):
        """Which key of a block which row sees, [64, ROWS] in ``layout``."""
        key = block * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
        token = gl.arange(0, self.ROWS, gl.SliceLayout(0, layout)) // self.HEADS
        return key[:, None] <= gl.minimum(token + self.offset, self.keys - 1)[None, :]
