"""Shared memory of the stored backward: a ring of chunks, P and dS, and barriers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from absorbed_mla.kernels.hopper.backward_shared import allocate_operand, copy_to
from absorbed_mla.kernels.hopper.layouts import SWIZZLED, operand_layout
from absorbed_mla.kernels.hopper.ring import Ring, new_barriers
from absorbed_mla.kernels.hopper.synchronize import synchronize
from absorbed_mla.kernels.hopper.tile import ROWS
from absorbed_mla.kernels.triton_private import aggregate

# Keys of a block, the N of a product: for so many the tensor cores take as long as shared memory
# needs to bring them and to write the next.
KEYS = gl.constexpr(128)
# Columns of a chunk.
CHUNK = SWIZZLED
# Chunks in the ring: a block of 9 and the beginning of the next.
STAGES = gl.constexpr(11)
# P's in shared memory: one that dS is made of, and the next.
HANDED = gl.constexpr(2)


@aggregate
class StoredBackwardStorage:
    """Buffers, and barriers that stored_backward_kernel.py describes.

    Attributes:
        chunks: [11, 128, 64]: 64 columns of 128 keys, or of the tile's 64 queries and of their dO.
        probs: P, [2, 64, 128].
        grad_scores: dS, [1, 64, 128].
        ring: Of the chunks; both roles release each.
        probs_full, probs_empty, grad_go: One for each P.
        CHUNKS: Of the latents' columns.
        R: Width of k_rope.
    """

    chunks: gl.shared_memory_descriptor
    probs: gl.shared_memory_descriptor
    grad_scores: gl.shared_memory_descriptor
    ring: Ring
    probs_full: gl.shared_memory_descriptor
    probs_empty: gl.shared_memory_descriptor
    grad_go: gl.shared_memory_descriptor
    CHUNKS: gl.constexpr
    R: gl.constexpr

    @gluon.jit
    def keys(self, number, WIDTH: gl.constexpr):
        """A chunk of keys, [128, WIDTH]."""
        LAYOUT: gl.constexpr = operand_layout(WIDTH)
        return self.chunks.index(number % STAGES)._reinterpret(
            self.chunks.dtype, [KEYS, WIDTH], LAYOUT
        )

    @gluon.jit
    def rows(self, number, half: gl.constexpr, WIDTH: gl.constexpr):
        """A chunk of the queries (half 0) or of dO (1), [64, WIDTH]."""
        LAYOUT: gl.constexpr = operand_layout(WIDTH)
        place = self.chunks.index(number % STAGES).slice(half * ROWS, ROWS, dim=0)
        return place._reinterpret(place.dtype, [ROWS, WIDTH], LAYOUT)


@gluon.jit
def allocate(dtype: gl.constexpr, C: gl.constexpr, R: gl.constexpr):
    """Shared memory with its barriers ready for use."""
    storage = StoredBackwardStorage(
        chunks=allocate_operand(dtype, KEYS, CHUNK, STAGES),
        probs=allocate_operand(dtype, ROWS, KEYS, HANDED),
        grad_scores=allocate_operand(dtype, ROWS, KEYS),
        ring=Ring(new_barriers(STAGES), new_barriers(STAGES, 2), STAGES),
        probs_full=new_barriers(HANDED),
        probs_empty=new_barriers(HANDED),
        grad_go=new_barriers(HANDED),
        CHUNKS=C // CHUNK,
        R=R,
    )
    fence_async_shared()
    return storage


@gluon.jit
def load_rows(tile, shared, q_content, q_rope, grad_out, number):
    """Load queries and dO of a tile, chunk by chunk, the first being the ``number``-th."""
    nbytes: gl.constexpr = q_content.block_type.nbytes + grad_out.block_type.nbytes
    for chunk in gl.static_range(shared.CHUNKS):
        full = shared.ring.acquire(number + chunk, nbytes)
        position = [tile.query_start, tile.batch, tile.head, chunk * CHUNK]
        copy_to(q_content, position, full, shared.rows(number + chunk, 0, CHUNK))
        copy_to(grad_out, position, full, shared.rows(number + chunk, 1, CHUNK))
    number = number + shared.CHUNKS
    full = shared.ring.acquire(number, q_rope.block_type.nbytes)
    position = [tile.query_start, tile.batch, tile.head, 0]
    copy_to(q_rope, position, full, shared.rows(number, 0, shared.R))


@gluon.jit
def load_keys(tile, shared, latent, k_rope, block, number):
    """Load a block of keys, likewise."""
    key = tile.key_start + block * KEYS
    for chunk in gl.static_range(shared.CHUNKS):
        full = shared.ring.acquire(number + chunk, latent.block_type.nbytes)
        position = [key, tile.batch, chunk * CHUNK]
        copy_to(latent, position, full, shared.keys(number + chunk, CHUNK))
    number = number + shared.CHUNKS
    full = shared.ring.acquire(number, k_rope.block_type.nbytes)
    copy_to(k_rope, [key, tile.batch, 0], full, shared.keys(number, shared.R))


@gluon.jit
def take_rows(shared, number, half: gl.constexpr, WIDTHS: gl.constexpr, layout: gl.constexpr):
    """Queries or dO in registers, as operands of products in ``layout``: a chunk of each width."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    rows = ()
    for chunk in gl.static_range(len(WIDTHS)):
        shared.ring.wait(number + chunk)
        rows += (shared.rows(number + chunk, half, WIDTHS[chunk]).load(operand),)
        synchronize()
        shared.ring.release(number + chunk)
    return rows


@gluon.jit
def add_chunks(
    shared, acc, rows, number, WIDTHS: gl.constexpr, FIRST: gl.constexpr, END: gl.constexpr
):
    """Add the products of some chunks of rows in registers and of a block of keys.

    Args:
        shared: What ``allocate`` gave.
        acc: Their sum so far, fp32 [64, 128]; not read if the first chunk is among them.
        rows: What ``take_rows`` gave.
        number: Of the block's first chunk.
        WIDTHS: Of all chunks.
        FIRST: Of the chunks that are added.
        END: One past the last.

    Returns:
        The sum, to which the last chunk's product is still being added.
    """
    for chunk in gl.static_range(FIRST, END):
        shared.ring.wait(number + chunk)
        keys = shared.keys(number + chunk, WIDTHS[chunk]).permute((1, 0))
        acc = warpgroup_mma(rows[chunk], keys, acc, use_acc=chunk > 0, is_async=True)
        if chunk > 0:
            acc = warpgroup_mma_wait(1, deps=[acc])
            shared.ring.release(number + chunk - 1)
    return acc


@gluon.jit
def finish_product(shared, acc, number, WIDTHS: gl.constexpr):
    """The sum of all chunks when it is done."""
    acc = warpgroup_mma_wait(0, deps=[acc])
    shared.ring.release(number + len(WIDTHS) - 1)
    return acc
