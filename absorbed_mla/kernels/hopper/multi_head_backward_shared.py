"""Shared memory of the multi-head backward: operands, and the copies that fill them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from absorbed_mla.kernels.hopper.backward_shared import (
    allocate_operand,
    clear_outside,
    copy_to,
    finish_clearing,
)
from absorbed_mla.kernels.hopper.multi_head_backward_tile import KEYS, QUERIES
from absorbed_mla.kernels.hopper.ring import new_barriers, ring_position
from absorbed_mla.kernels.hopper.synchronize import synchronize
from absorbed_mla.kernels.triton_private import aggregate

# Blocks of queries in shared memory: the one that dK is computed of, the next one, of which the
# scores are, and one on its way.
STAGES = gl.constexpr(3)


@aggregate
class MultiHeadBackwardStorage:
    """Operands in shared memory, and the barriers of their arrival.

    Attributes:
        k_content, k_rope, value: Of the tile, [1, 128, D], [1, 128, R] and [1, 128, V].
        q_content, q_rope, grad_out: Of the stages, [3, 64, D], [3, 64, R] and [3, 64, V].
        lse, delta: What scores and dP start from, fp32 [3, 1, 64]; see multi_head_backward_rows.py.
        grad_scores: dS^T, [1, 128, 64].
        keys_full: The tile's keys and values are there.
        q_content_full, q_rope_full, grad_out_full, lse_full, delta_full: What a block of queries
            has is there; one for each stage. They are so many because between two copies that
            arrive at barriers of one allocation the compiler synchronizes all warps.
        CONTENT: D.
        R: Width of the rope part.
        V: Width of values.
        DTYPE: Of queries, keys and values.
    """

    k_content: gl.shared_memory_descriptor
    k_rope: gl.shared_memory_descriptor
    value: gl.shared_memory_descriptor
    q_content: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor
    grad_out: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    grad_scores: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    q_content_full: gl.shared_memory_descriptor
    q_rope_full: gl.shared_memory_descriptor
    grad_out_full: gl.shared_memory_descriptor
    lse_full: gl.shared_memory_descriptor
    delta_full: gl.shared_memory_descriptor
    CONTENT: gl.constexpr
    R: gl.constexpr
    V: gl.constexpr
    DTYPE: gl.constexpr


@gluon.jit
def allocate(q_content, q_rope, grad_out, lse):
    """Shared memory for the boxes of these tensor maps, with its barriers ready for use."""
    dtype: gl.constexpr = q_content.dtype
    # By name: Triton 3.6 takes a layout for a constant only if it is declared one.
    PLAIN: gl.constexpr = lse.layout
    CONTENT: gl.constexpr = q_content.block_shape[3]
    R: gl.constexpr = q_rope.block_shape[3]
    V: gl.constexpr = grad_out.block_shape[3]
    storage = MultiHeadBackwardStorage(
        k_content=allocate_operand(dtype, KEYS, CONTENT),
        k_rope=allocate_operand(dtype, KEYS, R),
        value=allocate_operand(dtype, KEYS, V),
        q_content=allocate_operand(dtype, QUERIES, CONTENT, STAGES),
        q_rope=allocate_operand(dtype, QUERIES, R, STAGES),
        grad_out=allocate_operand(dtype, QUERIES, V, STAGES),
        lse=gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], PLAIN),
        delta=gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], PLAIN),
        grad_scores=allocate_operand(dtype, KEYS, QUERIES),
        keys_full=new_barriers(1),
        q_content_full=new_barriers(STAGES),
        q_rope_full=new_barriers(STAGES),
        grad_out_full=new_barriers(STAGES),
        lse_full=new_barriers(STAGES),
        delta_full=new_barriers(STAGES),
        CONTENT=CONTENT,
        R=R,
        V=V,
        DTYPE=dtype,
    )
    fence_async_shared()
    synchronize()
    return storage


@gluon.jit
def load_keys(tile, shared, k_content, k_rope, value):
    """Begin to copy the tile's keys and values, whether or not all 128 are in it."""
    full = shared.keys_full.index(0)
    nbytes: gl.constexpr = (
        k_content.block_type.nbytes + k_rope.block_type.nbytes + value.block_type.nbytes
    )
    mbarrier.expect(full, nbytes)
    position = [tile.key_start, tile.batch, tile.head, 0]
    copy_to(k_content, position, full, shared.k_content.index(0))
    copy_to(value, position, full, shared.value.index(0))
    position = [tile.key_start, tile.batch, tile.head, shared.CONTENT]
    copy_to(k_rope, position, full, shared.k_rope.index(0))


@gluon.jit
def load_rows(tile, shared, q_content, q_rope, grad_out, lse, delta, block):
    """Begin to copy what a block of queries has, when nobody needs what is in its stage."""
    stage = block % STAGES
    mbarrier.expect(shared.q_content_full.index(stage), q_content.block_type.nbytes)
    mbarrier.expect(shared.q_rope_full.index(stage), q_rope.block_type.nbytes)
    mbarrier.expect(shared.grad_out_full.index(stage), grad_out.block_type.nbytes)
    mbarrier.expect(shared.lse_full.index(stage), lse.block_type.nbytes)
    mbarrier.expect(shared.delta_full.index(stage), delta.block_type.nbytes)
    query = tile.first + block * QUERIES
    position = [query, tile.batch, tile.head, 0]
    copy_to(q_content, position, shared.q_content_full.index(stage), shared.q_content.index(stage))
    copy_to(grad_out, position, shared.grad_out_full.index(stage), shared.grad_out.index(stage))
    position = [query, tile.batch, tile.head, shared.CONTENT]
    copy_to(q_rope, position, shared.q_rope_full.index(stage), shared.q_rope.index(stage))
    row = [tile.batch * gl.num_programs(1) + tile.head, query]
    full = shared.lse_full.index(stage)
    tma.async_copy_global_to_shared(lse, row, full, shared.lse.index(stage))
    full = shared.delta_full.index(stage)
    tma.async_copy_global_to_shared(delta, row, full, shared.delta.index(stage))


@gluon.jit
def wait_for_keys(tile, shared):
    """Wait for keys and values; those that are not the tile's, or that nobody sees, become zeros.

    P and dS are zero there, but 0 * NaN is not.
    """
    mbarrier.wait(shared.keys_full.index(0), 0)
    seen = gl.where(tile.query_start < tile.query_end, tile.keys, 0)
    if seen < KEYS:
        clear_outside(shared.k_content, 0, seen)
        clear_outside(shared.k_rope, 0, seen)
        clear_outside(shared.value, 0, seen)
        finish_clearing()


@gluon.jit
def wait_for_rows(tile, shared, block):
    """Wait for a block of queries, likewise."""
    stage, parity = ring_position(block, STAGES)
    mbarrier.wait(shared.q_content_full.index(stage), parity)
    mbarrier.wait(shared.q_rope_full.index(stage), parity)
    mbarrier.wait(shared.grad_out_full.index(stage), parity)
    mbarrier.wait(shared.lse_full.index(stage), parity)
    mbarrier.wait(shared.delta_full.index(stage), parity)
    if tile.has_others(block):
        first = tile.first + block * QUERIES
        before, end = tile.query_start - first, tile.query_end - first
        clear_outside(shared.q_content, before, end, stage)
        clear_outside(shared.q_rope, before, end, stage)
        clear_outside(shared.grad_out, before, end, stage)
        finish_clearing()
