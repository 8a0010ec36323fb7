"""FP8 rows for few query rows: a ring of column chunks in shared memory that warps decode.

Rows are those of ``absorbed_mla/fp8_latents.py``, and so are the bits. A piece is the 128 columns
of a block of 64 keys that share their scales, 8 KiB. The copy engine keeps the ring full, so that
bytes are always under way; whole blocks are asked for before, as far as the L2 cache, because what
lies together comes from memory faster than a piece of every row. Two roles decode pieces by turns,
one while the other waits, and write bf16 where products read it. k_rope, which is bf16 in rows, is
loaded to where it is read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from absorbed_mla.kernels.hopper.few_rows_shared import DECODE_ROLES, GROUP, SCALES
from absorbed_mla.kernels.hopper.forward_scores import count_blocks
from absorbed_mla.kernels.hopper.forward_shared import STAGES
from absorbed_mla.kernels.hopper.fp8_rows import UNIT
from absorbed_mla.kernels.hopper.l2_prefetch import prefetch
from absorbed_mla.kernels.hopper.paged_keys import PagedKeys, load_pages
from absorbed_mla.kernels.hopper.ring import wait_empty, wait_full
from absorbed_mla.kernels.hopper.synchronize import synchronize
from absorbed_mla.kernels.hopper.tile import KEYS
from absorbed_mla.kernels.triton_private import aggregate

# Of each role that decodes.
DECODE_WARPS = gl.constexpr(4)
# Of a piece in registers, four values in a word. A thread has 16 neighbouring bytes; eight lanes
# have those of eight rows, which the swizzle of shared memory has put into different banks, as it
# does when they are 32 bytes in bf16.
_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [DECODE_WARPS.value, 1], [0, 1]))
# Of a block of bf16 numbers in shared memory, two in a word.
_PAIRS = gl.constexpr(gl.NVMMASharedLayout(128, 32))


@aggregate
class Fp8Pieces:
    """Where rows are; one warp loads their pieces.

    Attributes:
        keys: Where the rows' values and k_rope are, with tensor maps of boxes of 128 values, four
            in a word, and of k_rope.
        scales: Tensor map of [block_size, blocks, C / 128] fp32 in boxes [keys that lie together,
            1, C / 128].
        words: Pointer to the first row, int32.
        block_units: From a block of the cache to the next, in units of 16 bytes.
        row_units: From a row of a block to the next, likewise.
        together: Bytes of 64 rows, 0 if these may not lie together.
        AHEAD: Blocks that are asked for before the one that is loaded.
    """

    keys: PagedKeys
    scales: tma.tensor_descriptor
    words: gl.tensor
    block_units: gl.tensor
    row_units: gl.tensor
    together: gl.tensor
    AHEAD: gl.constexpr

    @gluon.jit
    def load(self, tile, shared, blocks):
        """Load each piece as soon as there is a place for it.

        Args:
            tile: The tile.
            shared: What ``allocate_few_rows`` gave.
            blocks: Of the tiles before.
        """
        GROUPS: gl.constexpr = shared.C // GROUP
        found = ()
        for block in gl.static_range(self.AHEAD + 1):
            found += (self.keys.find_pages(tile, block),)  # type: ignore[assignment]  # unrolled
        for block in gl.static_range(self.AHEAD):
            self.prefetch(tile, block, found[block])
        for block in range(count_blocks(tile)):
            number = blocks + block
            stage = number % STAGES
            pages = found[0]
            self.prefetch(tile, block + self.AHEAD, found[self.AHEAD])
            found = found[1:]
            found += (self.keys.find_pages(tile, block + self.AHEAD + 1),)
            for column in gl.static_range(0, shared.C, GROUP):
                piece = number * GROUPS + column // GROUP
                place = piece % shared.PIECES
                before = piece - shared.PIECES
                if before >= 0:
                    _wait_until_decoded(shared, before)
                if column == 0:
                    full = shared.scale_full.index(number % SCALES)
                    load_pages(self.scales, pages, 0, full, shared.scales.index(number % SCALES))
                full = shared.piece_full.index(piece % shared.TURNS)
                load_pages(self.keys.latent, pages, column // 4, full, shared.pieces.index(place))
            wait_empty(shared.rope_ring.empty, number, STAGES)
            full = shared.rope_ring.full.index(stage)
            load_pages(self.keys.k_rope, pages, 0, full, shared.k_rope.index(stage))

    @gluon.jit
    def prefetch(self, tile, block, pages):
        """Ask for the rows of a block to come to the L2 cache, if they lie together."""
        PAGE: gl.constexpr = self.keys.k_rope.block_shape[0]
        if PAGE == KEYS:
            cache_block, slot = pages[0]
            # The table of a tile without keys may have any blocks.
            size = gl.where(block * KEYS < tile.keys, self.together, 0)
            cache_block = gl.where(size > 0, cache_block, 0)
            unit = cache_block.to(gl.int64) * self.block_units + slot.to(gl.int64) * self.row_units
            prefetch(self.words + unit * UNIT, size, 1)


@gluon.jit
def _wait_until_decoded(shared, piece):
    """Wait as the scores do. No later piece of the same place among the latents can be there."""
    COUNT: gl.constexpr = STAGES * (shared.C // GROUP)
    wait_full(shared.latents_full, piece, COUNT)


@gluon.jit
def decode_role(part, shared, FIRST: gl.constexpr):
    """Decode every other piece of all blocks.

    Args:
        part: Of the work.
        shared: What ``allocate_few_rows`` gave.
        FIRST: Piece of a block, of those which the role decodes.
    """
    begin, end = part.range()
    blocks = gl.to_tensor(0)
    for index in range(begin, end):
        count = count_blocks(part.tile(index))
        for block in range(count):
            _decode_block(shared, blocks + block, FIRST)
        blocks += count


@gluon.jit
def _decode_block(shared, number, FIRST: gl.constexpr):
    GROUPS: gl.constexpr = shared.C // GROUP
    stage = number % STAGES
    for group in gl.static_range(FIRST, GROUPS, DECODE_ROLES):
        words, scale = _read(shared, number, group)
        if group == FIRST:
            wait_empty(shared.latents_empty, number, STAGES)
        # As pairs of columns.
        latents = shared.latents.index(stage)._reinterpret(gl.int32, [KEYS, shared.C // 2], _PAIRS)
        latents.slice(group * (GROUP // 2), GROUP // 2, dim=1).store(_decoded(words, scale))
        fence_async_shared()
        synchronize()
        mbarrier.arrive(shared.latents_full.index(stage * GROUPS + group))


@gluon.jit
def _read(shared, number, group: gl.constexpr):
    """A piece of a block when it is there, int32 [64, 32], and its keys' scales, fp32 [64, 1].

    Args:
        shared: What ``allocate_few_rows`` gave.
        number: Of the block, counted by the program.
        group: Which of its pieces.
    """
    GROUPS: gl.constexpr = shared.C // GROUP
    piece = number * GROUPS + group
    turn = piece % shared.TURNS
    wait_full(shared.scale_full, number, SCALES)
    mbarrier.wait(shared.piece_full.index(turn), piece // shared.TURNS & 1)
    words = shared.pieces.index(piece % shared.PIECES).reshape([KEYS, GROUP // 4]).load(_LAYOUT)
    scales = shared.scales.index(number % SCALES).reshape([KEYS, GROUPS])
    return words, scales.slice(group, 1, dim=1).load(_LAYOUT)


@gluon.jit
def _decoded(words, scale):
    """Products of value and scale in fp32, in bf16: pairs, int32 [64, 64]."""
    # The values are decoded to fp16, which has all of them.
    left, right = gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, a, b, c, d;
        .reg .b32 left, right;
        .reg .f32 w, x, y, z;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 left, low;
        cvt.rn.f16x2.e4m3x2 right, high;
        mov.b32 {a, b}, left;
        mov.b32 {c, d}, right;
        cvt.f32.f16 w, a;
        cvt.f32.f16 x, b;
        cvt.f32.f16 y, c;
        cvt.f32.f16 z, d;
        mul.f32 w, w, $3;
        mul.f32 x, x, $3;
        mul.f32 y, y, $3;
        mul.f32 z, z, $3;
        cvt.rn.bf16x2.f32 $0, x, w;
        cvt.rn.bf16x2.f32 $1, z, y;
        }""",
        "=r,=r,r,f",
        [words, scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.join(left, right).reshape([KEYS, GROUP // 2])
