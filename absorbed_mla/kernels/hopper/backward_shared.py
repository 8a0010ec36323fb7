"""Shared memory of the backward over the latent: operand buffers, and the loads that fill them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from absorbed_mla.kernels.hopper.layouts import SWIZZLED, operand_layout, row_layout
from absorbed_mla.kernels.hopper.synchronize import synchronize
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS
from absorbed_mla.kernels.triton_private import aggregate

# Shifting the number of a block of keys by as much, or 3 less, leaves 0: it is below 2**25, because
# keys are counted in int32.
_ALL_BITS = gl.constexpr(30)


@aggregate
class BackwardStorage:
    """Operands in shared memory, each [1, 64, its columns], and the barriers of their arrival.

    Attributes:
        q_content, q_rope, grad_out: Rows of the tile.
        latent, k_rope: A block of keys.
        probs: P, [rows, keys].
        grad_scores: dS times the scale of the scores, [rows, keys].
        rows_full: All rows are there.
        keys_full: The block of keys is there; ``rows_full`` where keys come otherwise.
    """

    q_content: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor
    grad_out: gl.shared_memory_descriptor
    latent: gl.shared_memory_descriptor
    k_rope: gl.shared_memory_descriptor
    probs: gl.shared_memory_descriptor
    grad_scores: gl.shared_memory_descriptor
    rows_full: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor


@gluon.jit
def allocate(
    dtype: gl.constexpr, C: gl.constexpr, R: gl.constexpr, LOADS_KEYS: gl.constexpr = True
):
    """Shared memory with its barriers ready for use: ``keys_full`` if ``load_keys`` is called."""
    q_content = allocate_operand(dtype, ROWS, C)
    q_rope = allocate_operand(dtype, ROWS, R)
    grad_out = allocate_operand(dtype, ROWS, C)
    latent = allocate_operand(dtype, KEYS, C)
    k_rope = allocate_operand(dtype, KEYS, R)
    probs = allocate_operand(dtype, ROWS, KEYS)
    grad_scores = allocate_operand(dtype, ROWS, KEYS)
    rows_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(rows_full, count=1)
    keys_full = rows_full  # as in new_barriers, none is unused
    if LOADS_KEYS:
        keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(keys_full, count=1)
    fence_async_shared()
    synchronize()
    return BackwardStorage(
        q_content, q_rope, grad_out, latent, k_rope, probs, grad_scores, rows_full, keys_full
    )


@gluon.jit
def allocate_operand(
    dtype: gl.constexpr, LENGTH: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr = 1
):
    """An operand [STAGES, LENGTH, COLUMNS]; one stage has an axis, too, for ``at_step``."""
    return gl.allocate_shared_memory(dtype, [STAGES, LENGTH, COLUMNS], operand_layout(COLUMNS))


@gluon.jit
def at_step(operand, i, STEP: gl.constexpr):
    """An operand, [64, its columns], as a step (0 to 3) of block ``i`` takes it.

    The index is always 0. Were it a constant, the compiler would compute the descriptors of all
    products, more than a hundred, before the loop, keep them in registers, and spill. Each step
    shifts by another number, lest the descriptors of one step be kept for the next.
    """
    return operand.index(i >> (_ALL_BITS - STEP))


@gluon.jit
def load_rows(q_content, q_rope, grad_out, shared, tile):
    """Begin to copy what the tile's rows have, whether or not all 64 are in it."""
    nbytes: gl.constexpr = (
        q_content.block_type.nbytes + q_rope.block_type.nbytes + grad_out.block_type.nbytes
    )
    mbarrier.expect(shared.rows_full, nbytes)
    position = [tile.query_start, tile.batch, tile.head, 0]
    copy_to(q_content, position, shared.rows_full, shared.q_content)
    copy_to(q_rope, position, shared.rows_full, shared.q_rope)
    copy_to(grad_out, position, shared.rows_full, shared.grad_out)


@gluon.jit
def load_keys(latent, k_rope, shared, tile, first):
    """Begin to copy the block of keys at ``first``."""
    nbytes: gl.constexpr = latent.block_type.nbytes + k_rope.block_type.nbytes
    mbarrier.expect(shared.keys_full, nbytes)
    position = [first, tile.batch, 0]
    copy_to(latent, position, shared.keys_full, shared.latent)
    copy_to(k_rope, position, shared.keys_full, shared.k_rope)


@gluon.jit
def copy_to(source, position, barrier, operand):
    """Begin to copy a block of a tensor map to an operand of as many elements."""
    target = operand._reinterpret(operand.dtype, source.block_shape, source.layout)
    tma.async_copy_global_to_shared(source, position, barrier, target)


@gluon.jit
def clear_outside(operand, first, end, stage=0):
    """Zero rows before ``first`` and from ``end`` on: they are of others, and may hold anything.

    ``finish_clearing`` must come before a product reads the operand.
    """
    W: gl.constexpr = operand.shape[2]
    WIDTH: gl.constexpr = W if W < SWIZZLED else SWIZZLED
    layout: gl.constexpr = row_layout(WIDTH, gl.num_warps())
    row = gl.arange(0, operand.shape[1], gl.SliceLayout(1, layout))
    inside = ((row >= first) & (row < end))[:, None]
    zero = gl.full([operand.shape[1], WIDTH], 0, operand.dtype, layout)
    for column in gl.static_range(0, W, WIDTH):
        part = operand.index(stage).slice(column, WIDTH, dim=1)
        part.store(gl.where(inside, part.load(layout), zero))


@gluon.jit
def finish_clearing():
    """Let the tensor cores see what was cleared."""
    fence_async_shared()
    synchronize()
