"""The backward kernel: a tile of 64 rows (tokens x heads) meets its keys, 64 at a time.

One program is one tile. Its query, dO and, in registers, dQ stay; blocks of keys pass by, and what
they get, dKV, is added up over all programs in global memory. The latent is key and value at once,
so dK and dV are one sum, [64, C + R] per block. For every block, by all eight warps together:

1. S = Q K^T and dP = dO V^T, then P = exp(S - LSE) and dS = P (dP - delta), to shared memory.
2. dQ += dS K. The keys were needed for the last time, so the copy of the next block over them
   starts here and is hidden behind step 3.
3. dKV = P^T dO + dS^T Q, 128 columns at a time, each reduced into global memory while the products
   of the next run: the first columns' follow dQ's at once, and the last columns are reduced when
   the next block's dP is being computed.

Two warpgroups split the columns of every product: 144 registers of each thread are dQ, and 64 what
is computed now. Shared memory, 224 of 227 KiB (C = 512, R = 64), has no room for a second
block of keys, nor for dKV on its way out: reductions leave from registers, 16 bytes per thread and
512 contiguous ones per warp, because dKV lies in memory in the order of the accumulators' fragments
(backward_fragments.py). Programs arrive in any order, so the last bits differ between runs.

What limits it on an H200 is the L2, which has to take 144 KiB of reductions per 22.5 MFLOP.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from absorbed_mla.kernels.hopper.backward_fragments import Fragments
from absorbed_mla.kernels.hopper.backward_shared import (
    allocate,
    at_step,
    clear_outside,
    finish_clearing,
    load_keys,
    load_rows,
    synchronize,
)
from absorbed_mla.kernels.hopper.layouts import SWIZZLED, accumulator_layout, row_layout
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS, read_tile

# Columns of dKV at a time. 64 read shared memory too often for what they compute; 256 do not fit
# into the registers.
COLUMNS = gl.constexpr(128)
LOG2_E = gl.constexpr(math.log2(math.e))


@gluon.constexpr_function
def key_accumulator(columns):
    """Layout of [64, columns] in the two warpgroups."""
    return accumulator_layout(columns, 2)


@gluon.jit
def read_statistics(lse, delta, tile, batches, heads, layout: gl.constexpr):
    """The rows' LSE, times log2(e), and delta, each fp32 [64] in ``layout``.

    A row that saw nothing, or is not in the tile, gets inf, hence P = exp(-inf), and 0, hence a
    finite dS, whatever the gradient of its LSE of -inf is.
    """
    index, valid = tile.rows(batches, heads, layout)
    row_lse = gl.load(lse + index, mask=valid, other=float("-inf"))
    seen = row_lse != float("-inf")
    row_delta = gl.load(delta + index, mask=seen, other=0.0)
    return gl.where(seen, row_lse * LOG2_E, float("inf")), row_delta


@gluon.jit
def start_scores(shared, i):
    """Begin S = Q K^T, then dP = dO V^T, each [rows, keys] fp32."""
    zero = gl.zeros([ROWS, KEYS], gl.float32, key_accumulator(KEYS))
    k_content = at_step(shared.latent, i, 0).permute((1, 0))
    k_rope = at_step(shared.k_rope, i, 0).permute((1, 0))
    value = at_step(shared.latent, i, 1).permute((1, 0))
    s = warpgroup_mma(at_step(shared.q_rope, i, 0), k_rope, zero, use_acc=False, is_async=True)
    s = warpgroup_mma(at_step(shared.q_content, i, 0), k_content, s, is_async=True)
    dp = warpgroup_mma(at_step(shared.grad_out, i, 1), value, zero, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def write_probs(shared, tile, i, first, s, lse, scale):
    """Wait for S, and write P = exp(S - LSE) to shared memory.

    Args:
        shared: Has all operands.
        tile: The program's.
        i: The block's number in the tile.
        first: The block's first key.
        s: S, behind which only dP was begun.
        lse: Of the rows, times log2(e), [64].
        scale: Of the scores.

    Returns:
        P, fp32 [rows, keys].
    """
    s = warpgroup_mma_wait(1, deps=[s])
    p = gl.exp2(s * (scale * LOG2_E) - lse[:, None])
    if tile.hides_some(i, first):
        p = gl.where(tile.sees_from(i, first, key_accumulator(KEYS)), p, 0.0)
    # The other warpgroup has read those of the last block.
    synchronize()
    shared.probs.index(0).store(p.to(shared.probs.dtype))
    return p


@gluon.jit
def write_grad_scores(shared, p, dp, delta, scale):
    """Wait for dP, write dS = P (dP - delta) times the scale, and let the tensor cores see both."""
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = p * (dp - delta[:, None]) * scale
    shared.grad_scores.index(0).store(ds.to(shared.grad_scores.dtype))
    fence_async_shared()
    synchronize()


@gluon.jit
def start_query_gradient(shared, i, dq_content, dq_rope):
    """Begin to add dS K to dQ, [rows, C] and [rows, R] fp32."""
    ds = at_step(shared.grad_scores, i, 2)
    dq_content = warpgroup_mma(ds, at_step(shared.latent, i, 2), dq_content, is_async=True)
    dq_rope = warpgroup_mma(ds, at_step(shared.k_rope, i, 2), dq_rope, is_async=True)
    return dq_content, dq_rope


@gluon.jit
def start_part(shared, i, column: gl.constexpr, place):
    """Begin P^T dO + dS^T Q of ``COLUMNS`` columns from ``column`` on: two products.

    ``place`` is an accumulator whose numbers nobody needs any more: the part gets its registers.
    Were it always zeros, the compiler would take other registers for every part, and spill.
    """
    p = at_step(shared.probs, i, 3).permute((1, 0))
    ds = at_step(shared.grad_scores, i, 3).permute((1, 0))
    do_part = at_step(shared.grad_out, i, 3).slice(column, COLUMNS, dim=1)
    q_part = at_step(shared.q_content, i, 3).slice(column, COLUMNS, dim=1)
    part = warpgroup_mma(p, do_part, place, use_acc=False, is_async=True)
    return warpgroup_mma(ds, q_part, part, is_async=True)


@gluon.jit
def start_rope_part(shared, i, place):
    """Begin dS^T Q of the columns of k_rope in some of the registers of ``place``."""
    R: gl.constexpr = shared.k_rope.shape[2]
    for _ in gl.static_range(COLUMNS // R // 2):
        place = _first_half(place)
    ds = at_step(shared.grad_scores, i, 3).permute((1, 0))
    return warpgroup_mma(ds, at_step(shared.q_rope, i, 3), place, use_acc=False, is_async=True)


@gluon.jit
def _first_half(place):
    """Half of the registers of an accumulator: of each warpgroup's columns the first half."""
    W: gl.constexpr = place.shape[1]
    first, _second = gl.split(place.reshape([KEYS, 2, 2, W // 4]).permute([0, 1, 3, 2]))
    first = first.reshape([KEYS, W // 2])
    return gl.convert_layout(first, key_accumulator(W // 2), assert_trivial=True)


@gluon.jit
def start_key_gradient(shared, i):
    """Begin the first columns of P^T dO + dS^T Q, two products; and a place for the next."""
    zero = gl.zeros([KEYS, COLUMNS], gl.float32, key_accumulator(COLUMNS))
    return start_part(shared, i, 0, zero), zero


@gluon.jit
def reduce_key_gradient(shared, i, part, place, target):
    """Give P^T dO + dS^T Q of the block, [64, C + R], to ``target``, all but the last columns.

    While some columns are reduced into memory, the products of the next run.

    Args:
        shared: Has all operands.
        i: The block's number in the tile.
        part: The first columns, and
        place: where the next may be computed, as ``start_key_gradient`` returned them.
        target: Where the block has its gradient.

    Returns:
        The last of the C columns, [64, ``COLUMNS``], which are still to be added.
    """
    C: gl.constexpr = shared.latent.shape[2]
    for column in gl.static_range(COLUMNS, C, COLUMNS):
        following = start_part(shared, i, column, place)
        place = warpgroup_mma_wait(2, deps=[part])
        target.add(place, column - COLUMNS)
        part = following
    rope = start_rope_part(shared, i, place)
    last, rope = warpgroup_mma_wait(0, deps=[part, rope])
    target.add(rope, C)
    return last


@gluon.jit
def store_rows(acc, operand, target, tile, batches, heads, STRIDE: gl.constexpr):
    """Store an accumulator as rows of [S_q, B, N, STRIDE]; ``operand`` is shared memory to use."""
    W: gl.constexpr = acc.shape[1]
    WIDTH: gl.constexpr = W if W < SWIZZLED else SWIZZLED
    layout: gl.constexpr = row_layout(WIDTH, gl.num_warps())
    operand.index(0).store(acc.to(operand.dtype))
    index, valid = tile.rows(batches, heads, gl.SliceLayout(1, layout))
    at = (index * STRIDE)[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    for column in gl.static_range(0, W, WIDTH):
        part = operand.index(0).slice(column, WIDTH, dim=1).load(layout)
        gl.store(target + at + column, part, mask=valid[:, None])


@gluon.jit(do_not_specialize=["key_blocks"])
def attend_backward(
    q_content,
    q_rope,
    grad_out,
    latent,
    k_rope,
    lse,
    delta,
    tiles,
    dq_content,
    dq_rope,
    dkv,
    batches,
    heads,
    key_blocks,
    scale,
    C: gl.constexpr,
    R: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Gradients of every tile; one program for each tile, entry of the batch and group of heads.

    Blocks of keys are counted from the first key of all, not of the tile.

    Args:
        q_content: Tensor map of [S_q, B, N, C] in boxes [64 / HEADS, 1, HEADS, C].
        q_rope: Of [S_q, B, N, R] in boxes [64 / HEADS, 1, HEADS, R].
        grad_out: As q_content.
        latent: Of [S_k, B, C] in boxes [64, 1, C].
        k_rope: Of [S_k, B, R] in boxes [64, 1, R].
        lse: fp32 [S_q, B, N], contiguous like all that follows.
        delta: fp32 [S_q, B, N].
        tiles: int32 [tiles, 5], see ``query_tiles`` in tiles.py.
        dq_content: [S_q, B, N, C], written.
        dq_rope: [S_q, B, N, R], written.
        dkv: fp32 [B, key_blocks, 64 * (C + R)], added to; see backward_fragments.py.
        batches: B.
        heads: N.
        key_blocks: S_k / 64, rounded up.
        scale: Of the scores.
        C: ``kv_lora_rank``.
        R: Width of k_rope.
        HEADS: Heads in a tile.
    """
    tile = read_tile(tiles, gl.program_id(0), batches, heads, HEADS)
    shared = allocate(latent.dtype, C, R)
    block = tile.key_start // KEYS
    blocks = (tile.key_end + KEYS - 1) // KEYS - block
    # A tile without keys still stores zeros.
    blocks = gl.where(tile.key_end > tile.key_start, blocks, 0)
    load_rows(q_content, q_rope, grad_out, shared, tile)
    if blocks > 0:
        load_keys(latent, k_rope, shared, tile, block * KEYS)

    rows_layout: gl.constexpr = gl.SliceLayout(1, key_accumulator(KEYS))
    row_lse, row_delta = read_statistics(lse, delta, tile, batches, heads, rows_layout)
    rows = (tile.query_end - tile.query_start) * HEADS
    mbarrier.wait(shared.rows_full, 0)
    if rows < ROWS:
        clear_outside(shared.q_content, 0, rows)
        clear_outside(shared.q_rope, 0, rows)
        clear_outside(shared.grad_out, 0, rows)
        finish_clearing()

    target = dkv + (tile.batch.to(gl.int64) * key_blocks + block) * (KEYS * (C + R))
    acc_content = gl.zeros([ROWS, C], gl.float32, key_accumulator(C))
    acc_rope = gl.zeros([ROWS, R], gl.float32, key_accumulator(R))
    last = gl.zeros([KEYS, COLUMNS], gl.float32, key_accumulator(COLUMNS))
    for i in range(blocks):
        first = (block + i) * KEYS
        mbarrier.wait(shared.keys_full, i & 1)
        if (first < tile.key_start) | (first + KEYS > tile.key_end):
            clear_outside(shared.latent, tile.key_start - first, tile.key_end - first)
            clear_outside(shared.k_rope, tile.key_start - first, tile.key_end - first)
            finish_clearing()
        s, dp = start_scores(shared, i)
        p = write_probs(shared, tile, i, first, s, row_lse, scale)
        # Of the block before; the first block adds zeros to its own.
        Fragments(target + gl.where(i > 0, -KEYS * (C + R), 0)).add(last, C - COLUMNS)
        write_grad_scores(shared, p, dp, row_delta, scale)
        acc_content, acc_rope = start_query_gradient(shared, i, acc_content, acc_rope)
        part, place = start_key_gradient(shared, i)
        # dQ is done, the part is not.
        acc_content, acc_rope = warpgroup_mma_wait(2, deps=[acc_content, acc_rope])
        # Both warpgroups are done with the keys.
        synchronize()
        if i + 1 < blocks:
            load_keys(latent, k_rope, shared, tile, first + KEYS)
        last = reduce_key_gradient(shared, i, part, place, Fragments(target))
        target += KEYS * (C + R)
    if blocks > 0:
        Fragments(target + -KEYS * (C + R)).add(last, C - COLUMNS)

    synchronize()
    store_rows(acc_content, shared.q_content, dq_content, tile, batches, heads, C)
    store_rows(acc_rope, shared.q_rope, dq_rope, tile, batches, heads, R)
