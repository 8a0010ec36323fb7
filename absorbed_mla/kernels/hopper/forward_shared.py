"""Shared memory of the forward kernel, and the barriers that say what is in it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from absorbed_mla.kernels.hopper.layouts import SWIZZLED, operand_layout, row_layout
from absorbed_mla.kernels.hopper.ring import new_barriers
from absorbed_mla.kernels.hopper.synchronize import synchronize
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS
from absorbed_mla.kernels.triton_private import aggregate

# Blocks of keys in shared memory: the one in a stage, and in stage ^ 1 the next.
STAGES = gl.constexpr(2)


@aggregate
class ForwardStorage:
    """Buffers, and barriers that forward_kernel.py describes.

    Attributes:
        q_content: [64 / HEADS, 1, HEADS, C].
        q_rope: [64 / HEADS, 1, HEADS, R].
        left, right: Halves of the latents' columns, [2, 64, 1, C / 2].
        rope: k_rope, then P of the same block: [2, 64, 64].
        factor: What the accumulators are multiplied by before a block is added, [2, 64] fp32.
        changes: For every 16 rows whether a factor is not 1, int32 [2, 4].
        norm: Reciprocal of the denominators, [64] fp32.
        q_full, q_empty, norm_full, norm_empty: One barrier.
        rope_full, p_full, right_go, left_empty, right_empty: One for each stage.
        k_full: One for each stage and chunk, see ``chunk_full``.
        C: ``kv_lora_rank``.
        R: Width of k_rope.
        CHUNK: Columns of the latents that arrive together.
        ROPE_LAYOUT: Of k_rope, [64, 1, R].
        READER_FENCES: See ``keys_are_there``.
        IN_REGISTERS: Operands that the score role has in registers: 1: P; 2: k_rope's queries, too.
        RIGHT_WAITS: Whether ``right_go`` is used; else it is ``p_full``: see ring.py.
    """

    q_content: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    factor: gl.shared_memory_descriptor
    changes: gl.shared_memory_descriptor
    norm: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    rope_full: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    right_go: gl.shared_memory_descriptor
    left_empty: gl.shared_memory_descriptor
    right_empty: gl.shared_memory_descriptor
    norm_full: gl.shared_memory_descriptor
    norm_empty: gl.shared_memory_descriptor
    C: gl.constexpr
    R: gl.constexpr
    CHUNK: gl.constexpr
    ROPE_LAYOUT: gl.constexpr
    READER_FENCES: gl.constexpr
    IN_REGISTERS: gl.constexpr
    RIGHT_WAITS: gl.constexpr

    @gluon.jit
    def probs(self, stage):
        """P of the block in a stage, [64, 64]."""
        return self.rope.index(stage)

    @gluon.jit
    def k_rope(self, stage):
        """k_rope of the block in a stage, [64, 1, R]."""
        return self.rope.index(stage)._reinterpret(
            self.rope.dtype, [KEYS, 1, self.R], self.ROPE_LAYOUT
        )


@gluon.jit
def allocate(
    q_content,
    q_rope,
    latent,
    k_rope,
    C: gl.constexpr,
    R: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
    RIGHT_WAITS: gl.constexpr = False,
):
    """All shared memory, for the boxes of these tensor maps."""
    # By name: Triton 3.6 takes a layout for a constant only if it is declared one.
    LATENT_LAYOUT: gl.constexpr = latent.layout
    ROPE_LAYOUT: gl.constexpr = k_rope.layout
    CHUNK: gl.constexpr = latent.block_shape[2]
    return allocate_blocks(
        q_content,
        q_rope,
        C,
        R,
        CHUNK,
        LATENT_LAYOUT,
        ROPE_LAYOUT,
        IN_REGISTERS=IN_REGISTERS,
        RIGHT_WAITS=RIGHT_WAITS,
    )


@gluon.jit
def allocate_blocks(
    q_content,
    q_rope,
    C: gl.constexpr,
    R: gl.constexpr,
    CHUNK: gl.constexpr,
    LATENT_LAYOUT: gl.constexpr,
    ROPE_LAYOUT: gl.constexpr,
    READER_FENCES: gl.constexpr = False,
    IN_REGISTERS: gl.constexpr = 0,
    RIGHT_WAITS: gl.constexpr = False,
):
    """All shared memory, for the boxes of the queries and blocks of keys of these layouts.

    Args:
        q_content: Tensor map.
        q_rope: Tensor map.
        C: ``kv_lora_rank``.
        R: Width of k_rope.
        CHUNK: Columns of the latents that arrive together.
        LATENT_LAYOUT: Of [64, 1, columns of the latents].
        ROPE_LAYOUT: Of [64, 1, R].
        READER_FENCES: See ``keys_are_there``.
        IN_REGISTERS: As ``ForwardStorage`` has it.
        RIGHT_WAITS: Likewise.
    """
    dtype: gl.constexpr = q_content.dtype
    CHUNKS: gl.constexpr = C // CHUNK
    half: gl.constexpr = [STAGES, KEYS, 1, C // 2]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    p_full = new_barriers(STAGES)
    storage = ForwardStorage(
        q_content=gl.allocate_shared_memory(dtype, q_content.block_shape, q_content.layout),
        q_rope=gl.allocate_shared_memory(dtype, q_rope.block_shape, q_rope.layout),
        left=gl.allocate_shared_memory(dtype, half, LATENT_LAYOUT),
        right=gl.allocate_shared_memory(dtype, half, LATENT_LAYOUT),
        rope=gl.allocate_shared_memory(dtype, [STAGES, ROWS, KEYS], operand_layout(KEYS)),
        factor=gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain),
        changes=gl.allocate_shared_memory(gl.int32, [STAGES, 4], plain),
        norm=gl.allocate_shared_memory(gl.float32, [ROWS], plain),
        q_full=new_barriers(1),
        q_empty=new_barriers(1),
        k_full=new_barriers(STAGES * CHUNKS),
        rope_full=new_barriers(STAGES),
        p_full=p_full,
        right_go=new_barriers(STAGES) if RIGHT_WAITS else p_full,
        left_empty=new_barriers(STAGES),
        right_empty=new_barriers(STAGES),
        norm_full=new_barriers(1),
        norm_empty=new_barriers(1),
        C=C,
        R=R,
        CHUNK=CHUNK,
        ROPE_LAYOUT=ROPE_LAYOUT,
        READER_FENCES=READER_FENCES,
        IN_REGISTERS=IN_REGISTERS,
        RIGHT_WAITS=RIGHT_WAITS,
    )
    fence_async_shared()
    return storage


@gluon.jit
def load_queries(tile, entry, shared, q_content, q_rope, tiles=0):
    """Load a tile's queries when the scores are done with those of the tile before.

    Args:
        tile: The tile.
        entry: Of the batch.
        shared: What ``allocate`` gave.
        q_content: Tensor map.
        q_rope: Tensor map.
        tiles: How many the program has had before.
    """
    mbarrier.wait(shared.q_empty.index(0), (tiles & 1) ^ 1)
    full = shared.q_full.index(0)
    mbarrier.expect(full, q_content.block_type.nbytes + q_rope.block_type.nbytes)
    position = [tile.query_start, entry, tile.head, 0]
    tma.async_copy_global_to_shared(q_content, position, full, shared.q_content)
    tma.async_copy_global_to_shared(q_rope, position, full, shared.q_rope)


@gluon.jit
def chunk_full(shared, stage, column: gl.constexpr):
    """The barrier of the chunk that begins at a column."""
    CHUNKS: gl.constexpr = shared.C // shared.CHUNK
    return shared.k_full.index(stage * CHUNKS + column // shared.CHUNK)


@gluon.jit
def keys_are_there(shared, full, parity):
    """Wait for keys that products are to read.

    What threads have written needs a fence before the products. Where these threads have loads
    under way, for which a fence of theirs would wait, the readers fence.
    """
    mbarrier.wait(full, parity)
    if shared.READER_FENCES:
        fence_async_shared()


@gluon.jit
def announce(full, READER_FENCES: gl.constexpr = False):
    """Tell the other roles what the role's warps have written; see ``keys_are_there``."""
    if not READER_FENCES:
        fence_async_shared()
    synchronize()
    mbarrier.arrive(full)


@gluon.jit
def clear_rows(values, count):
    """Zero all but the first ``count`` rows of [64, C / 2]: P is 0 there, but 0 * NaN is not."""
    layout: gl.constexpr = row_layout(SWIZZLED, gl.num_warps())
    row = gl.arange(0, KEYS, gl.SliceLayout(1, layout))[:, None]
    COLUMNS: gl.constexpr = values.shape[1]
    for column in gl.static_range(0, COLUMNS, SWIZZLED):
        part = values.slice(column, SWIZZLED, dim=1)
        part.store(gl.where(row < count, part.load(layout), 0.0).to(values.dtype))
    fence_async_shared()
