"""Keys of the decode kernel in rows of FP8, which are decoded on the way to shared memory.

Rows are those of ``absorbed_mla/fp8_latents.py``, and so are the bits. Only the numbers' way to
shared memory differs from that of paged_keys.py; stages and barriers are the same. There is no room
for what is not decoded, so

* whole blocks are asked for ``BLOCKS_AHEAD`` blocks before, as far as the L2 cache,
* and their bytes wait in registers: while the warps decode a part of a block, 64 columns or k_rope,
  those ``PARTS_AHEAD`` parts later, at last of the next block, are under way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from absorbed_mla.kernels import fp8_latents
from absorbed_mla.kernels.hopper.decode_kernel import load_role, score_role, value_role
from absorbed_mla.kernels.hopper.decode_tile import Part
from absorbed_mla.kernels.hopper.forward_scores import count_blocks
from absorbed_mla.kernels.hopper.forward_shared import STAGES, allocate_blocks, announce, chunk_full
from absorbed_mla.kernels.hopper.l2_prefetch import prefetch
from absorbed_mla.kernels.hopper.layouts import SWIZZLED, block_layout, row_layout
from absorbed_mla.kernels.hopper.ring import empty_position
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS
from absorbed_mla.kernels.triton_private import aggregate

LOAD_WARPS = gl.constexpr(4)
# Registers of each thread of a role, of 504; the score role gets what the others leave.
VALUE_REGISTERS = gl.constexpr(176)
LOAD_REGISTERS = gl.constexpr(112)
# Parts of a block, 64 columns or k_rope, that wait in registers.
PARTS_AHEAD = gl.constexpr(3)
# Blocks that are on their way to the L2 cache.
BLOCKS_AHEAD = gl.constexpr(2)
# Of decoded columns in registers.
_LAYOUT = gl.constexpr(row_layout(SWIZZLED.value, LOAD_WARPS.value))
# Values with one scale.
GROUP = gl.constexpr(fp8_latents.GROUP)
# Words of 16 bytes, of which rows begin at multiples.
UNIT = gl.constexpr(4)


@aggregate
class Fp8Rows:
    """Where rows are; ``LOAD_WARPS`` warps load and decode them.

    Attributes:
        words: Pointer to the first row, int32.
        block_units: From a block of the cache to the next, in units of 16 bytes.
        row_units: From a row of a block to the next, likewise.
        together: Bytes of 64 rows, 0 if there is anything between rows.
        block_table: [Q, blocks of a request], int32 or int64, last axis contiguous.
        table_stride: Of ``block_table``.
        BLOCK_SIZE: Keys in a block of the cache.
    """

    words: gl.tensor
    block_units: gl.tensor
    row_units: gl.tensor
    together: gl.tensor
    block_table: gl.tensor
    table_stride: gl.tensor
    BLOCK_SIZE: gl.constexpr

    @gluon.jit
    def load(self, tile, shared, blocks):
        """Load each block as soon as the block before last is done with its stage.

        Args:
            tile: The tile.
            shared: What ``allocate_blocks`` gave.
            blocks: Of the tiles before.
        """
        PARTS: gl.constexpr = shared.C // SWIZZLED + 1  # columns, and k_rope
        AHEAD: gl.constexpr = PARTS_AHEAD if PARTS_AHEAD < PARTS else PARTS
        found = ()
        for block in gl.static_range(BLOCKS_AHEAD + 2):
            found += (self.find_blocks(tile, block),)  # type: ignore[assignment]  # unrolled
        for block in gl.static_range(BLOCKS_AHEAD):
            self.prefetch(tile, block, found[block])
        rows = self.rows(tile, 0, found[0])
        waiting = ()
        for part in gl.static_range(AHEAD):
            waiting += (_read(shared, rows, part),)  # type: ignore[assignment]  # unrolled
        for block in range(count_blocks(tile)):
            stage, parity = empty_position(blocks + block, STAGES)
            found = found[1:]
            if BLOCKS_AHEAD > 0:
                self.prefetch(tile, block + BLOCKS_AHEAD, found[BLOCKS_AHEAD - 1])
            found += (self.find_blocks(tile, block + BLOCKS_AHEAD + 2),)
            for part in gl.static_range(PARTS):
                if part + AHEAD == PARTS:
                    rows = self.rows(tile, block + 1, found[0])
                read = _read(shared, rows, (part + AHEAD) % PARTS)
                _write(shared, waiting[0], stage, parity, part)
                waiting = waiting[1:]
                waiting += (read,)

    @gluon.jit
    def find_blocks(self, tile, block):
        """Blocks of the cache where the keys of a block are: one, or those of 64 keys."""
        entries = self.block_table + tile.request.to(gl.int64) * self.table_stride
        key = block * KEYS
        if self.BLOCK_SIZE % KEYS != 0:
            key += gl.arange(0, KEYS, gl.SliceLayout(1, _LAYOUT))
        return gl.load(entries + _within(tile, key) // self.BLOCK_SIZE)

    @gluon.jit
    def rows(self, tile, block, found):
        """Pointers to the rows of these keys, [64]."""
        key = block * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, _LAYOUT))
        return self._place(tile, found, _within(tile, key) % self.BLOCK_SIZE)

    @gluon.jit
    def _place(self, tile, found, slot):
        """Pointers to slots of blocks; the table of a tile without keys may have any blocks."""
        found = gl.where(tile.keys > 0, found, 0)
        unit = found.to(gl.int64) * self.block_units + slot.to(gl.int64) * self.row_units
        return self.words + unit * UNIT

    @gluon.jit
    def prefetch(self, tile, block, found):
        """Ask for the rows of a block to come to the L2 cache, if they lie together."""
        if self.BLOCK_SIZE % KEYS == 0:
            size = gl.where(block * KEYS < tile.keys, self.together, 0)
            slot = _within(tile, block * KEYS) % self.BLOCK_SIZE
            first = self._place(tile, found, slot)
            prefetch(first, size, LOAD_WARPS)


@gluon.jit
def _read(shared, rows, part: gl.constexpr):
    """64 columns' values [64, 64], four in a word, and scales [64]; or k_rope, two in a word."""
    column: gl.constexpr = part * SWIZZLED
    first: gl.constexpr = shared.C // 4  # scale
    if column < shared.C:
        words = _words(rows, column // 4, SWIZZLED // 4, 2)
        read = words, gl.load(rows + first + column // GROUP)
    else:
        read = (_words(rows, first + shared.C // GROUP, shared.R // 2, 4),)
    return read


@gluon.jit
def _words(rows, first: gl.constexpr, COUNT: gl.constexpr, EACH: gl.constexpr):
    """Words of rows from ``first`` on, int32 [64, COUNT], ``EACH`` of a thread.

    Each is read once, so none is kept in the L1 cache.
    """
    layout: gl.constexpr = _word_layout(EACH)
    rows = gl.convert_layout(rows, gl.SliceLayout(1, layout))
    word = gl.arange(0, COUNT, gl.SliceLayout(0, layout))
    return gl.load(rows[:, None] + word[None, :] + first, cache_modifier=".cg")


@gluon.constexpr_function
def _word_layout(each):
    """Of words [64, ..]: those that 8 lanes have become 64 neighbouring columns of ``_LAYOUT``."""
    return gl.BlockedLayout([1, each], [4, 8], [LOAD_WARPS.value, 1], [1, 0])


@gluon.jit
def _within(tile, key):
    """Keys of the tile as keys of its request; those behind the tile's last key are that key."""
    return tile.key_start + gl.minimum(key, gl.maximum(tile.keys, 1) - 1)


@gluon.jit
def _write(shared, read, stage, parity, part: gl.constexpr):
    """Decode a part of a block to its place, when that is free; announce it with its chunk."""
    HALF: gl.constexpr = shared.C // 2
    column: gl.constexpr = part * SWIZZLED
    if column == 0:
        mbarrier.wait(shared.left_empty.index(stage), parity)
    if column == HALF:
        mbarrier.wait(shared.right_empty.index(stage), parity)
    if column < shared.C:
        half = shared.left if column < HALF else shared.right
        place = half.index(stage).reshape([KEYS, HALF]).slice(column % HALF, SWIZZLED, dim=1)
        place.store(_decoded(read, place.dtype))
        if (column + SWIZZLED) % shared.CHUNK == 0:
            announce(chunk_full(shared, stage, column), shared.READER_FENCES)
    else:
        place = shared.k_rope(stage).reshape([KEYS, shared.R])
        place.store(_widened(read[0], place.dtype))
        announce(shared.rope_full.index(stage), shared.READER_FENCES)


@gluon.jit
def _decoded(read, dtype: gl.constexpr):
    """Products of value and scale in fp32, [64, 64], in the model's dtype."""
    words, scale = read
    # Two instructions decode the four values of a word to fp16, which has all of them.
    a, b, c, d = gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, a, b, c, d;
        .reg .b32 left, right;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 left, low;
        cvt.rn.f16x2.e4m3x2 right, high;
        mov.b32 {a, b}, left;
        mov.b32 {c, d}, right;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        cvt.f32.f16 $2, c;
        cvt.f32.f16 $3, d;
        }""",
        "=f,=f,=f,=f,r",
        [words],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
    wide = gl.join(gl.join(a, c), gl.join(b, d)).reshape([KEYS, 4 * words.shape[1]])
    wide = gl.convert_layout(wide, _LAYOUT)
    scale = gl.cast(scale, gl.float32, bitcast=True)
    return (wide * scale[:, None]).to(dtype)


@gluon.jit
def _widened(words, dtype: gl.constexpr):
    """bf16 numbers, two in a word, [64, R] in the model's dtype."""
    low = gl.cast(words << 16, gl.float32, bitcast=True)
    high = gl.cast(words & -65536, gl.float32, bitcast=True)
    wide = gl.join(low, high).reshape([KEYS, 2 * words.shape[1]])
    return gl.convert_layout(wide, _LAYOUT).to(dtype)


@gluon.jit
def allocate_rows(q_content, q_rope, C: gl.constexpr, R: gl.constexpr):
    """All shared memory, for the boxes of the queries; a chunk of keys shares their scales."""
    CHUNK: gl.constexpr = GROUP if GROUP < C // 2 else C // 2
    layout: gl.constexpr = block_layout(C)
    rope_layout: gl.constexpr = block_layout(R)
    return allocate_blocks(q_content, q_rope, C, R, CHUNK, layout, rope_layout, True)


@gluon.jit(
    do_not_specialize=[
        "block_units",
        "row_units",
        "together",
        "table_stride",
        "heads",
        "head_blocks",
    ],
    do_not_specialize_on_alignment=["block_table"],
)
def attend_fp8_decode(
    q_content,
    q_rope,
    words,
    block_units,
    row_units,
    together,
    tiles,
    starts,
    block_table,
    out,
    lse,
    split_out,
    split_lse,
    BLOCK_SIZE: gl.constexpr,
    table_stride,
    heads,
    head_blocks,
    scale,
    HEADS: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """As ``attend_decode``, over rows that ``Fp8Rows`` describes.

    Args:
        words: int32 [blocks, BLOCK_SIZE, bytes of a row / 4].
        block_units: From a block to the next, in units of 16 bytes.
        row_units: From a row to the next, likewise.
        together: As ``Fp8Rows`` has it.
        BLOCK_SIZE: Keys in a block of the cache.
    """
    part = Part(tiles, starts, head_blocks, HEADS, ROWS)
    begin, end = part.range()
    if begin < end:
        shared = allocate_rows(q_content, q_rope, C, R)
        units = block_units, row_units, together
        keys = Fp8Rows(words, *units, block_table, table_stride, BLOCK_SIZE)
        queries = q_content, q_rope
        whole, waiting = (out, lse), (split_out, split_lse)
        gl.warp_specialize(
            [
                (score_role, (part, shared, whole, waiting, heads, scale, SPLIT)),
                (value_role, (part, shared, whole, waiting, heads, SPLIT)),
                (load_role, (part, shared, queries, keys)),
            ],
            [4, LOAD_WARPS],  # warps of the roles but the first, which has the launch's four
            [VALUE_REGISTERS, LOAD_REGISTERS],
        )
