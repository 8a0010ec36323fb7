"""The backward kernel that adds to no memory: dQ, with P and dS stored for two matrix products.

A tile of 64 rows meets its keys as in backward_kernel.py, of which this is steps 1 and 2: S and dP,
P and dS, dQ += dS K. Instead of dKV, 144 KiB of fp32 for every block of 64 keys, it gives away P
and dS, 16 KiB, which the copy engine (TMA) stores while dQ is computed. What the keys get,
P^T dO + dS^T Q, are plain products over all rows then (stored_backward.py).

Keys come in two halves of the latent's columns. As soon as dQ's first half is done, the next
block's first half is on its way, and S begins with it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate  # as in tile.py

from absorbed_mla.kernels.hopper.backward_kernel import (
    LOG2_E,
    key_accumulator,
    read_statistics,
    store_rows,
)
from absorbed_mla.kernels.hopper.backward_shared import (
    allocate_operand,
    at_step,
    clear_outside,
    copy_to,
    finish_clearing,
    load_rows,
)
from absorbed_mla.kernels.hopper.synchronize import synchronize
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS, read_tile


@aggregate
class Shared:
    """Operands in shared memory, each [1, 64, its columns], and the barriers of their arrival.

    Attributes:
        q_content, q_rope, grad_out: Rows of the tile.
        left, right: The halves of the latents' columns of a block of keys.
        k_rope: Of the block.
        probs: P, [rows, keys].
        grad_scores: dS times the scale of the scores, [rows, keys].
        rows_full: All rows are there.
        left_full: The left half is there.
        right_full: The right half and k_rope are there.
    """

    q_content: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor
    grad_out: gl.shared_memory_descriptor
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    k_rope: gl.shared_memory_descriptor
    probs: gl.shared_memory_descriptor
    grad_scores: gl.shared_memory_descriptor
    rows_full: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, operands, barriers):
        (
            self.q_content,
            self.q_rope,
            self.grad_out,
            self.left,
            self.right,
            self.k_rope,
            self.probs,
            self.grad_scores,
        ) = operands
        self.rows_full, self.left_full, self.right_full = barriers


@gluon.jit
def _allocate(dtype: gl.constexpr, C: gl.constexpr, R: gl.constexpr):
    """Shared memory with its barriers ready for use."""
    operands = (
        allocate_operand(dtype, ROWS, C),
        allocate_operand(dtype, ROWS, R),
        allocate_operand(dtype, ROWS, C),
        allocate_operand(dtype, KEYS, C // 2),
        allocate_operand(dtype, KEYS, C // 2),
        allocate_operand(dtype, KEYS, R),
        allocate_operand(dtype, ROWS, KEYS),
        allocate_operand(dtype, ROWS, KEYS),
    )
    rows_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    left_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    right_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(rows_full, count=1)
    mbarrier.init(left_full, count=1)
    mbarrier.init(right_full, count=1)
    fence_async_shared()
    synchronize()
    return Shared(operands, (rows_full, left_full, right_full))


@gluon.jit
def _load_left(latent, shared, tile, first):
    """Begin to copy the left half of the block of keys at ``first``."""
    mbarrier.expect(shared.left_full, latent.block_type.nbytes)
    copy_to(latent, [first, tile.batch, 0], shared.left_full, shared.left)


@gluon.jit
def _load_right(latent, k_rope, shared, tile, first):
    """Begin to copy the right half and k_rope."""
    nbytes: gl.constexpr = latent.block_type.nbytes + k_rope.block_type.nbytes
    HALF: gl.constexpr = shared.right.shape[2]
    mbarrier.expect(shared.right_full, nbytes)
    copy_to(latent, [first, tile.batch, HALF], shared.right_full, shared.right)
    copy_to(k_rope, [first, tile.batch, 0], shared.right_full, shared.k_rope)


@gluon.jit
def _scores(shared, i):
    """Begin S = Q K^T as soon as half of the keys is there, then dP = dO V^T in two products."""
    HALF: gl.constexpr = shared.left.shape[2]
    zero = gl.zeros([ROWS, KEYS], gl.float32, key_accumulator(KEYS))
    left = at_step(shared.left, i, 0).permute((1, 0))
    q_left = at_step(shared.q_content, i, 0).slice(0, HALF, dim=1)
    s = warpgroup_mma(q_left, left, zero, use_acc=False, is_async=True)
    mbarrier.wait(shared.right_full, i & 1)
    right = at_step(shared.right, i, 0).permute((1, 0))
    k_rope = at_step(shared.k_rope, i, 0).permute((1, 0))
    q_right = at_step(shared.q_content, i, 0).slice(HALF, HALF, dim=1)
    s = warpgroup_mma(q_right, right, s, is_async=True)
    s = warpgroup_mma(at_step(shared.q_rope, i, 0), k_rope, s, is_async=True)
    left = at_step(shared.left, i, 1).permute((1, 0))
    right = at_step(shared.right, i, 1).permute((1, 0))
    do_left = at_step(shared.grad_out, i, 1).slice(0, HALF, dim=1)
    do_right = at_step(shared.grad_out, i, 1).slice(HALF, HALF, dim=1)
    dp = warpgroup_mma(do_left, left, zero, use_acc=False, is_async=True)
    return s, warpgroup_mma(do_right, right, dp, is_async=True)


@gluon.jit
def _write_scores(shared, tile, i, first, s, dp, lse, delta, scale):
    """Wait for S and dP, and write P and dS to shared memory; arguments as in backward_kernel."""
    dtype: gl.constexpr = shared.probs.dtype
    # Behind S two products were begun.
    s = warpgroup_mma_wait(2, deps=[s])
    p = gl.exp2(s * (scale * LOG2_E) - lse[:, None])
    if tile.hides_some(i, first):
        p = gl.where(tile.sees_from(i, first, key_accumulator(KEYS)), p, 0.0)
    # Those of the last block have been stored, and read by the other warpgroup.
    tma.store_wait(0)
    synchronize()
    shared.probs.index(0).store(p.to(dtype))
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = p * (dp - delta[:, None]) * scale
    shared.grad_scores.index(0).store(ds.to(dtype))
    fence_async_shared()
    synchronize()


@gluon.jit
def _store(target, position, source):
    """Begin to copy an operand to a block of a tensor map of as many elements."""
    block = source._reinterpret(source.dtype, target.block_shape, target.layout)
    tma.async_copy_shared_to_global(target, position, block)


@gluon.jit
def _store_scores(shared, tile, probs, grad_scores, first_token, column):
    """Begin to store P and dS of a block."""
    position = [tile.batch, tile.query_start - first_token, tile.head, column]
    _store(probs, position, shared.probs)
    _store(grad_scores, position, shared.grad_scores)


@gluon.jit
def _store_zeros(shared, tile, probs, grad_scores, first_token, begin, end):
    """Let P and dS be 0 of the keys' blocks ``begin`` to ``end``, none of which the tile sees."""
    tma.store_wait(0)
    synchronize()
    zero = gl.zeros([ROWS, KEYS], shared.probs.dtype, key_accumulator(KEYS))
    shared.probs.index(0).store(zero)
    shared.grad_scores.index(0).store(zero)
    fence_async_shared()
    synchronize()
    for block in range(begin, end):
        _store_scores(shared, tile, probs, grad_scores, first_token, block * KEYS)


@gluon.jit
def _clear_keys(shared, tile, i, first):
    """Zero what is no key of the tile, when all of the block is there."""
    mbarrier.wait(shared.right_full, i & 1)
    before, end = tile.key_start - first, tile.key_end - first
    clear_outside(shared.left, before, end)
    clear_outside(shared.right, before, end)
    clear_outside(shared.k_rope, before, end)
    finish_clearing()


@gluon.jit(
    do_not_specialize=["batches", "heads", "first_token", "first_block", "stored_blocks"],
    do_not_specialize_on_alignment=["tiles"],
)
def attend_backward_stored(
    q_content,
    q_rope,
    grad_out,
    latent,
    k_rope,
    probs,
    grad_scores,
    lse,
    delta,
    tiles,
    dq_content,
    dq_rope,
    batches,
    heads,
    first_token,
    first_block,
    stored_blocks,
    scale,
    C: gl.constexpr,
    R: gl.constexpr,
    HEADS: gl.constexpr,
):
    """dQ, P and dS of some tiles; one program for each, entry of the batch and group of heads.

    Args:
        q_content: Tensor map of [S_q, B, N, C] in boxes [64 / HEADS, 1, HEADS, C].
        q_rope: Of [S_q, B, N, R] in boxes [64 / HEADS, 1, HEADS, R].
        grad_out: As q_content.
        latent: Of [S_k, B, C] in boxes [64, 1, C / 2].
        k_rope: Of [S_k, B, R] in boxes [64, 1, R].
        probs: Of [B, tokens, N, 64 * stored_blocks] in boxes [1, 64 / HEADS, HEADS, 64], written.
        grad_scores: As probs.
        lse: fp32 [S_q, B, N], contiguous like all that follows.
        delta: fp32 [S_q, B, N].
        tiles: int32 [tiles, 5] of these tokens, see ``query_tiles`` in tiles.py.
        dq_content: [S_q, B, N, C], written.
        dq_rope: [S_q, B, N, R], written.
        batches: B.
        heads: N.
        first_token: Of ``probs``.
        first_block: Of the keys in ``probs``, blocks counted from the first key of all.
        stored_blocks: Of ``probs``; what no row of a tile sees is 0.
        scale: Of the scores.
        C: ``kv_lora_rank``.
        R: Width of k_rope.
        HEADS: Heads in a tile.
    """
    tile = read_tile(tiles, gl.program_id(0), batches, heads, HEADS)
    shared = _allocate(latent.dtype, C, R)
    blocks = (tile.key_end + KEYS - 1) // KEYS - first_block
    # A tile without keys still stores zeros.
    blocks = gl.where(tile.key_end > tile.key_start, blocks, 0)
    load_rows(q_content, q_rope, grad_out, shared, tile)
    if blocks > 0:
        _load_left(latent, shared, tile, first_block * KEYS)
        _load_right(latent, k_rope, shared, tile, first_block * KEYS)

    row_lse, row_delta = read_statistics(lse, delta, tile, batches, heads)
    rows = (tile.query_end - tile.query_start) * HEADS
    mbarrier.wait(shared.rows_full, 0)
    if rows < ROWS:
        clear_outside(shared.q_content, 0, rows)
        clear_outside(shared.q_rope, 0, rows)
        clear_outside(shared.grad_out, 0, rows)
        finish_clearing()

    HALF: gl.constexpr = C // 2
    dq_left = gl.zeros([ROWS, HALF], gl.float32, key_accumulator(HALF))
    dq_right = gl.zeros([ROWS, HALF], gl.float32, key_accumulator(HALF))
    acc_rope = gl.zeros([ROWS, R], gl.float32, key_accumulator(R))
    for i in range(blocks):
        first = (first_block + i) * KEYS
        mbarrier.wait(shared.left_full, i & 1)
        if (first < tile.key_start) | (first + KEYS > tile.key_end):
            _clear_keys(shared, tile, i, first)
        s, dp = _scores(shared, i)
        _write_scores(shared, tile, i, first, s, dp, row_lse, row_delta, scale)
        ds = at_step(shared.grad_scores, i, 2)
        dq_left = warpgroup_mma(ds, at_step(shared.left, i, 2), dq_left, is_async=True)
        dq_right = warpgroup_mma(ds, at_step(shared.right, i, 2), dq_right, is_async=True)
        acc_rope = warpgroup_mma(ds, at_step(shared.k_rope, i, 2), acc_rope, is_async=True)
        _store_scores(shared, tile, probs, grad_scores, first_token, i * KEYS)
        dq_left = warpgroup_mma_wait(2, deps=[dq_left])
        # Both warpgroups are done with the left half, and then with the rest.
        synchronize()
        if i + 1 < blocks:
            _load_left(latent, shared, tile, first + KEYS)
        dq_right, acc_rope = warpgroup_mma_wait(0, deps=[dq_right, acc_rope])
        synchronize()
        if i + 1 < blocks:
            _load_right(latent, k_rope, shared, tile, first + KEYS)

    if blocks < stored_blocks:
        _store_zeros(shared, tile, probs, grad_scores, first_token, blocks, stored_blocks)
    synchronize()
    store_rows(dq_left, shared.left, dq_content, tile, batches, heads, C)
    store_rows(dq_right, shared.right, dq_content + HALF, tile, batches, heads, C)
    store_rows(acc_rope, shared.q_rope, dq_rope, tile, batches, heads, R)
    tma.store_wait(0)
