"""Fixed KV splits (pieces) of parity mode, and how their outputs are added up.

A token's keys are divided into pieces of ``PIECE`` keys, from its first key on, whatever else is in
the batch. Each piece has an online softmax of its own, and outputs and LSE are added up one after
the other, weighted as paged/combine.py does it ``IN_ORDER``. So a token gets the same bits where
one program goes through all pieces (decode_pieces_kernel.py), as in training, and where each piece
has a program (decode_kernel.py), as for few long requests. Keys may be rows in FP8 (fp8_rows.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from absorbed_mla.kernels.hopper.decode_tile import DecodeTile
from absorbed_mla.kernels.hopper.layouts import accumulator_layout, sector_layout
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS
from absorbed_mla.kernels.hopper.tile_scheduler import count_turns, dealt
from absorbed_mla.kernels.paged.schedule import TABLE_COLUMNS
from absorbed_mla.kernels.triton_private import aggregate

# Keys of a piece, a multiple of those of a block. With fewer, long requests have more programs, and
# adding up takes longer.
PIECE = gl.constexpr(2048)
BLOCKS = gl.constexpr(PIECE.value // KEYS.value)
# Columns of the output that are added up at a time: a program's registers are full of its outputs.
COLUMNS = gl.constexpr(64)
_TABLE_COLUMNS = gl.constexpr(TABLE_COLUMNS.value)


@aggregate
class WholeTiles:
    """Tiles that a program goes through, each with all its keys, for some heads.

    They are dealt from the last one, which of a prompt has the most keys, to the first.

    Attributes:
        tiles: int32 [tiles, 8], contiguous, see paged/schedule.py.
        total: How many there are, times the groups of heads.
        head_blocks: Tiles for all heads of a token; the group of heads varies fastest, so that
            neighbours read the same keys.
        HEADS: Heads in a tile.
    """

    tiles: gl.tensor
    total: gl.tensor
    head_blocks: gl.tensor
    HEADS: gl.constexpr

    @gluon.jit
    def count(self):
        """How many the program has."""
        return count_turns(self.total)

    @gluon.jit
    def tile(self, turn):
        """One of them."""
        number = self.total - 1 - dealt(turn)
        entry = self.tiles + number // self.head_blocks * _TABLE_COLUMNS
        first = gl.load(entry + 1)
        return DecodeTile(
            request=gl.load(entry),
            query_start=first,
            query_end=first + gl.load(entry + 2),
            key_start=gl.to_tensor(0),
            keys=gl.load(entry + 4),
            offset=gl.load(entry + 3) - 1,
            place=gl.program_id(0),
            behind=gl.to_tensor(0),
            batch=gl.to_tensor(0),
            head=number % self.head_blocks * self.HEADS,
            HEADS=self.HEADS,
            ROWS=ROWS,
            IDLE_HEADS=True,
        )


@aggregate
class RunningSum:
    """The sum of a tile's pieces so far, and what the next one is added with.

    Attributes:
        out: fp32 [programs, 64, C], contiguous: what the score and the value role have added up,
            in an order of their own.
        factors: In shared memory, [5, 64] fp32: of every row what the sum so far is multiplied by,
            the weight of the piece, the sum of weights, the reciprocal of the piece's softmax's
            denominator, and the largest LSE, to base 2.
        full: Barrier: the factors are there.
        empty: Barrier: the value role has read them.
        COLUMNS: How many are added up at a time.
    """

    out: gl.tensor
    factors: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    COLUMNS: gl.constexpr

    @gluon.jit
    def weigh(self, top, denominator, scale, number, turn):
        """Tell the value role how a piece is added.

        Args:
            top: References of the piece's softmax, [64].
            denominator: Of the softmax, [64].
            scale: Of the scores, times log2(e).
            number: Of the piece in its tile.
            turn: Pieces that the program has had before.

        Returns:
            The first four ``factors``, and LSE of all pieces so far, to base 2.
        """
        layout: gl.constexpr = gl.SliceLayout(1, accumulator_layout(KEYS, 1))
        bits = gl.where(denominator > 0, top * scale + gl.log2(denominator), -float("inf"))
        norm = gl.where(denominator > 0, 1 / denominator, 0.0)
        before = gl.full([ROWS], -float("inf"), gl.float32, layout)
        total = gl.zeros([ROWS], gl.float32, layout)
        # The value role has read the factors of the piece before, of which this role needs two.
        mbarrier.wait(self.empty.index(0), (turn & 1) ^ 1)
        if number > 0:
            before = self.factors.index(4).load(layout)
            total = self.factors.index(2).load(layout)
        higher = gl.maximum(before, bits)
        shift = gl.where(higher == -float("inf"), 0.0, higher)
        decay, weight = gl.exp2(before - shift), gl.exp2(bits - shift)
        total = gl.fma(total, decay, weight)
        self.factors.index(0).store(decay)
        self.factors.index(1).store(weight)
        self.factors.index(2).store(total)
        self.factors.index(3).store(norm)
        self.factors.index(4).store(higher)
        mbarrier.arrive(self.full.index(0))
        found = gl.where(total > 0, higher + gl.log2(total), -float("inf"))
        return (decay, weight, total, norm), found

    @gluon.jit
    def read(self, turn, layout: gl.constexpr):
        """What ``weigh`` told: the factors in a layout."""
        mbarrier.wait(self.full.index(0), turn & 1)
        decay = self.factors.index(0).load(layout)
        weight = self.factors.index(1).load(layout)
        total = self.factors.index(2).load(layout)
        norm = self.factors.index(3).load(layout)
        mbarrier.arrive(self.empty.index(0))
        return decay, weight, total, norm

    @gluon.jit
    def add(self, tile, o, factors, out, heads, number, pieces, first: gl.constexpr):
        """Add columns of a piece; after the last piece, write them to the output.

        Args:
            tile: With the keys of the piece.
            o: Output of the piece, not normalised, columns from ``first`` on, [64, C / 2] fp32.
            factors: As ``weigh`` gives them, in the layout of any rows.
            out: [T, N, C], contiguous.
            heads: N.
            number: Of the piece.
            pieces: Of the tile.
            first: Column.
        """
        C: gl.constexpr = 2 * o.shape[1]
        END: gl.constexpr = first + o.shape[1]
        parts = _in_parts(o, self.COLUMNS)
        before = self._before(number, first, C)
        for part in gl.static_range(o.shape[1] // self.COLUMNS):
            column = first + part * self.COLUMNS
            # On its way while the part is added.
            after = column + self.COLUMNS
            following = self._before(number, after, C) if after < END else before
            self._add(tile, parts[part], before, factors, out, heads, number, pieces, column, C)
            before = following

    @gluon.jit
    def _before(self, number, first: gl.constexpr, C: gl.constexpr):
        """Columns of the sum so far, from ``first`` on; 0 before the first piece."""
        layout: gl.constexpr = accumulator_layout(self.COLUMNS, 1)
        there = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) < ROWS * number
        places = self._places(first, C)
        return gl.load(places, mask=there[:, None], other=0.0, eviction_policy="evict_last")

    @gluon.jit
    def _places(self, first: gl.constexpr, C: gl.constexpr):
        """Where columns wait: so that the numbers of a warp's register lie side by side.

        A thread reads nothing but what it wrote; see ``accumulator_layout`` for what it has.
        """
        layout: gl.constexpr = accumulator_layout(self.COLUMNS, 1)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        column = gl.arange(0, self.COLUMNS, gl.SliceLayout(0, layout))
        of_row = row // 8 % 2 * 256 + row // 16 * 64 + row % 8 * 8
        of_column = column // 8 * 512 + column % 8
        base = self.out + gl.program_id(0) * (ROWS * C) + first * ROWS
        return base + of_row[:, None] + of_column[None, :]

    @gluon.jit
    def _add(
        self,
        tile,
        o,
        before,
        factors,
        out,
        heads,
        number,
        pieces,
        first: gl.constexpr,
        C: gl.constexpr,
    ):
        decay, weight, total, norm = factors
        rows: gl.constexpr = gl.SliceLayout(1, accumulator_layout(self.COLUMNS, 1))
        decay = gl.convert_layout(decay, rows)[:, None]
        o = o * gl.convert_layout(norm, rows)[:, None]
        o = gl.fma(before, decay, o * gl.convert_layout(weight, rows)[:, None])
        if number < pieces - 1:
            gl.store(self._places(first, C), o, eviction_policy="evict_last")
        else:
            divisor = gl.convert_layout(gl.where(total == 0, 1.0, total), rows)[:, None]
            _store(tile, (o / divisor).to(out.dtype.element_ty), out, heads, first, C)


@gluon.jit
def running_sum(out, shared, COLUMNS: gl.constexpr = COLUMNS):
    """A ``RunningSum`` in this memory, of so many columns at a time.

    It has the barriers with which ``shared``, what ``allocate`` gave, hands over ``norm``: pieces
    have ``factors`` in its place.
    """
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factors = gl.allocate_shared_memory(gl.float32, [5, ROWS], plain)
    return RunningSum(out, factors, shared.norm_full, shared.norm_empty, COLUMNS)


@gluon.jit
def _in_parts(o, COLUMNS: gl.constexpr):
    """[64, columns] as a tuple of [64, COLUMNS], without moving a number."""
    WIDTH: gl.constexpr = o.shape[1]
    if WIDTH == COLUMNS:
        found = (o,)
    else:
        left, right = gl.split(o.reshape([ROWS, 2, WIDTH // 2]).permute((0, 2, 1)))
        layout: gl.constexpr = accumulator_layout(WIDTH // 2, 1)
        left = gl.convert_layout(left, layout, assert_trivial=True)
        right = gl.convert_layout(right, layout, assert_trivial=True)
        found = _in_parts(left, COLUMNS) + _in_parts(right, COLUMNS)
    return found


@gluon.jit
def _store(tile, values, out, heads, first: gl.constexpr, C: gl.constexpr):
    """Write 16-bit columns from ``first`` on of the tile's rows, [64, columns]."""
    COLUMNS: gl.constexpr = values.shape[1]
    layout: gl.constexpr = sector_layout(COLUMNS)
    index, inside = tile.rows(1, heads, gl.SliceLayout(1, layout))
    column = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    pointers = out + (index * C)[:, None] + column[None, :]
    gl.store(pointers, gl.convert_layout(values, layout), mask=inside[:, None])
