"""The multi-head (MHA) backward kernel, K and V per head: tiles of 128 keys, queries 64 at a time.

One program is one tile of keys of one head. Its keys and values stay in shared memory, and dK and
dV, 160 numbers a thread, in registers; blocks of queries pass by, and what they get, dQ, is added
up over all programs in global memory. Two warpgroups have 64 of the keys each, and for dQ half of
its columns each. Scores are transposed, [keys, queries], so that P^T and dS^T are operands of
products as they are in registers. For every block:

1. P^T = exp(S^T - LSE), of the scores that were begun in the block before.
2. dP^T = V dO^T, behind it dV += P^T dO; while dV is computed, dS^T = P^T (dP^T - delta) goes to
   shared memory, because dQ sums over the keys of both warpgroups.
3. dQ = dS K, most columns first; these are reduced into memory while the rest is computed.
4. S^T = K Q^T of the next block, dK += dS^T Q. The rest of dQ is reduced meanwhile, and step 1 of
   the next block runs while dK is computed.

So products are always queued behind those that a thread waits for. LSE and delta are not subtracted
but where the sums S^T and dP^T start from (multi_head_backward_rows.py). dS is computed of P as
rounded for the product: both in fp32 would not fit into the 255 registers.

dQ lies in memory in the order of the accumulators' fragments (backward_fragments.py), but that the
two warpgroups' groups of 8 columns alternate: a thread's place among the others is then its number,
for accumulators of any width, and takes one register. Programs arrive in any order, so its last
bits differ between runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from absorbed_mla.kernels.hopper.backward_fragments import keep_order, reduce_groups
from absorbed_mla.kernels.hopper.backward_shared import at_step
from absorbed_mla.kernels.hopper.layouts import accumulator_layout, sector_layout, tall_layout
from absorbed_mla.kernels.hopper.multi_head_backward_shared import (
    STAGES,
    allocate,
    load_keys,
    load_rows,
    wait_for_keys,
    wait_for_rows,
)
from absorbed_mla.kernels.hopper.multi_head_backward_tile import KEYS, QUERIES, read_tile
from absorbed_mla.kernels.hopper.synchronize import synchronize

# Bytes of a warpgroup's group of 8 columns, and of both warpgroups'.
_WARPGROUP = gl.constexpr(4 * 8 * 4 * 16)
_GROUP = gl.constexpr(2 * 4 * 8 * 4 * 16)


@gluon.jit
def add_fragments(part, target):
    """Add an accumulator [64, W] of two warpgroups to W * 64 numbers at ``target``."""
    reduce_groups(part, target, _WARPGROUP, _GROUP)


@gluon.jit
def _start_from(numbers, stage):
    """Numbers of the queries of a stage as the accumulator of a product, [128, 64] fp32."""
    layout: gl.constexpr = tall_layout(QUERIES)
    # A difference, because a sum with 0 would change -0 and therefore take instructions.
    return numbers.index(stage).load(layout) - gl.zeros([KEYS, QUERIES], gl.float32, layout)


@gluon.jit
def _start_scores(shared, block):
    """Begin S^T = K Q^T - LSE / scale, [128, 64] fp32, in two products."""
    stage = block % STAGES
    s = _start_from(shared.lse, stage)
    q_content = shared.q_content.index(stage).permute((1, 0))
    q_rope = shared.q_rope.index(stage).permute((1, 0))
    s = warpgroup_mma(at_step(shared.k_content, block, 0), q_content, s, is_async=True)
    return warpgroup_mma(at_step(shared.k_rope, block, 0), q_rope, s, is_async=True)


@gluon.jit
def _as_operand(values, dtype: gl.constexpr):
    """An accumulator [128, 64] as the left operand of products."""
    layout: gl.constexpr = gl.DotOperandLayout(0, tall_layout(QUERIES), 2)
    return gl.convert_layout(values.to(dtype), layout)


@gluon.jit
def _multiply(left, right):
    """The product of 16-bit numbers, two at a time; in fp32 it would take registers that lack."""
    BF16: gl.constexpr = left.dtype == gl.bfloat16
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;" if BF16 else "mul.rn.f16x2 $0, $1, $2;",
        "=r,r,r",
        [left, right],
        dtype=left.dtype,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _store_keys(acc, target, tile, index, heads, WIDTH: gl.constexpr, FIRST: gl.constexpr):
    """Store an accumulator as columns of [.., WIDTH], from ``FIRST`` on.

    Args:
        acc: [128, W] fp32.
        target: Pointer to [rows, WIDTH].
        tile: The program's.
        index: Row of its first key, int64; keys are ``heads`` rows apart.
        heads: See above.
        WIDTH: Of the target.
        FIRST: Column.
    """
    W: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = sector_layout(W, KEYS)
    key = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    row = index + key.to(gl.int64) * heads
    column = FIRST + gl.arange(0, W, gl.SliceLayout(0, layout))
    values = gl.convert_layout(acc.to(target.dtype.element_ty), layout)
    at = (row * WIDTH)[:, None] + column[None, :]
    gl.store(target + at, values, mask=(key < tile.keys)[:, None])


@gluon.jit(do_not_specialize=["query_blocks", "length", "window"])
def attend_multi_head_backward(
    q_content,
    q_rope,
    grad_out,
    lse,
    delta,
    k_content,
    k_rope,
    value,
    tiles,
    dq,
    dk,
    dv,
    query_blocks,
    length,
    exponent,
    scale,
    window,
):
    """Gradients of every tile; one program for each tile, head and entry of the batch.

    Args:
        q_content: Tensor map of queries [S_q, B, N, D + R] in boxes [64, 1, 1, D].
        q_rope: Of the same queries in boxes [64, 1, 1, R].
        grad_out: Of [S_q, B, N, V] in boxes [64, 1, 1, V].
        lse: Of what scores start from, fp32 [B * N, S_q] in boxes [1, 64].
        delta: Of what dP starts from, likewise.
        k_content: Of keys [S_k, B, N, D + R] in boxes [128, 1, 1, D].
        k_rope: Of the same keys in boxes [128, 1, 1, R].
        value: Of [S_k, B, N, V] in boxes [128, 1, 1, V].
        tiles: int32 [tiles, 6], see ``key_tiles`` in tiles.py.
        dq: fp32 [B * N, query_blocks, 64 * (D + R)], to which is added dQ / scale.
        dk: [buffers, S_k, B, N, D + R], written.
        dv: [buffers, S_k, B, N, V], written.
        query_blocks: S_q / 64, rounded up.
        length: S_k.
        exponent: Scale of the scores times log2(e).
        scale: Of the scores.
        window: Keys that a query sees, for which the tiles were made; None for all up to its own.
    """
    tile = read_tile(tiles, query_blocks)
    shared = allocate(q_content, q_rope, grad_out, lse)
    dtype: gl.constexpr = shared.DTYPE
    CONTENT: gl.constexpr = shared.CONTENT
    R: gl.constexpr = shared.R
    V: gl.constexpr = shared.V
    rows = (q_content, q_rope, grad_out, lse, delta)
    load_keys(tile, shared, k_content, k_rope, value)
    load_rows(tile, shared, *rows, 0)
    if tile.blocks > 1:
        load_rows(tile, shared, *rows, 1)

    batches, heads = gl.num_programs(2), gl.num_programs(1)
    group = (tile.batch * heads + tile.head).to(gl.int64)
    target = dq + (group * query_blocks + tile.first // QUERIES) * (QUERIES * (CONTENT + R))
    HALF: gl.constexpr = V // 2
    dv_left = gl.zeros([KEYS, HALF], gl.float32, tall_layout(HALF))
    dv_right = gl.zeros([KEYS, HALF], gl.float32, tall_layout(HALF))
    dk_content = gl.zeros([KEYS, CONTENT], gl.float32, tall_layout(CONTENT))
    dk_rope = gl.zeros([KEYS, R], gl.float32, tall_layout(R))
    zero_content = gl.zeros([QUERIES, CONTENT], gl.float32, accumulator_layout(CONTENT, 2))
    zero_rope = gl.zeros([QUERIES, R], gl.float32, accumulator_layout(R, 2))
    wait_for_keys(tile, shared)
    wait_for_rows(tile, shared, 0)
    s = warpgroup_mma_wait(0, deps=[_start_scores(shared, 0)])
    dk_content = warpgroup_mma_init(dk_content)
    for block in range(tile.blocks):
        stage = block % STAGES
        if tile.hides_some(block, window):
            s = tile.hide(s, block, tall_layout(QUERIES), window)
        p = _as_operand(gl.exp2(s * exponent), dtype)
        rows_out = shared.grad_out.index(stage)
        dv_left = warpgroup_mma(p, rows_out.slice(0, HALF, dim=1), dv_left, is_async=True)
        # dK of the last block is done: the operand dS needs no registers any more.
        dk_content = warpgroup_mma_wait(1, deps=[dk_content])
        keep_order()
        dp = _start_from(shared.delta, stage)
        values = at_step(shared.value, block, 1)
        dp = warpgroup_mma(values, rows_out.permute((1, 0)), dp, is_async=True)
        dv_right = warpgroup_mma(p, rows_out.slice(HALF, HALF, dim=1), dv_right, is_async=True)
        # Both warpgroups are done with all products of the last block.
        synchronize()
        if block + 2 < tile.blocks:
            load_rows(tile, shared, *rows, block + 2)
        dp, dv_left = warpgroup_mma_wait(1, deps=[dp, dv_left])
        ds = _multiply(gl.convert_layout(p, tall_layout(QUERIES)), dp.to(dtype))
        at_step(shared.grad_scores, block, 1).store(ds)
        fence_async_shared()
        synchronize()
        grad_scores = at_step(shared.grad_scores, block, 2).permute((1, 0))
        k_content_2 = at_step(shared.k_content, block, 2)
        k_rope_2 = at_step(shared.k_rope, block, 2)
        dq_content = warpgroup_mma(
            grad_scores, k_content_2, zero_content, use_acc=False, is_async=True
        )
        ds = _as_operand(ds, dtype)
        dk_rope = warpgroup_mma(ds, shared.q_rope.index(stage), dk_rope, is_async=True)
        dq_content, dv_right = warpgroup_mma_wait(1, deps=[dq_content, dv_right])
        add_fragments(dq_content, target)
        dq_rope = warpgroup_mma(grad_scores, k_rope_2, zero_rope, use_acc=False, is_async=True)
        # After the last block its scores once more.
        following = gl.minimum(block + 1, tile.blocks - 1)
        wait_for_rows(tile, shared, following)
        dq_rope, dk_rope = warpgroup_mma_wait(0, deps=[dq_rope, dk_rope])
        add_fragments(dq_rope, target + QUERIES * CONTENT)
        s = _start_scores(shared, following)
        dk_content = warpgroup_mma(ds, shared.q_content.index(stage), dk_content, is_async=True)
        target += QUERIES * (CONTENT + R)
        # Behind the scores is the product of dK.
        s = warpgroup_mma_wait(1, deps=[s])

    dk_content = warpgroup_mma_wait(0, deps=[dk_content])
    # Keys are as many rows of dK and dV apart as a token has heads in the batch.
    first = tile.buffer.to(gl.int64) * length + tile.key_start
    index = first * batches * heads + group
    apart = batches * heads
    _store_keys(dv_left, dv, tile, index, apart, V, 0)
    _store_keys(dv_right, dv, tile, index, apart, V, HALF)
    _store_keys(dk_content * scale, dk, tile, index, apart, CONTENT + R, 0)
    _store_keys(dk_rope * scale, dk, tile, index, apart, CONTENT + R, CONTENT)
