"""The sparse backward kernel: the backward kernel over lists of keys.

Tile, shared memory, products and their order are those of backward_kernel.py. Different are

* how keys come: all warps copy rows by ``cp.async``, where the other kernel asks the copy engine:
  after the last product that needs the block, hidden behind what keys get;
* where what keys get goes: to the rows of the keys, 16 bytes per thread and 64 contiguous ones per
  row, because the columns of dKV lie in the order in which threads have them (``key_rows.py``).
  In order, every entry of the lists has a row of its own that is written, not added to.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from absorbed_mla.kernels.hopper.backward_kernel import (
    COLUMNS,
    key_accumulator,
    read_statistics,
    start_part,
    start_query_gradient,
    start_rope_part,
    start_scores,
    store_rows,
    write_grad_scores,
    write_probs,
)
from absorbed_mla.kernels.hopper.backward_shared import allocate, finish_clearing, load_rows
from absorbed_mla.kernels.hopper.key_rows import KeyRows, row_layout_of_results
from absorbed_mla.kernels.hopper.layouts import SWIZZLED, row_layout
from absorbed_mla.kernels.hopper.sparse_tile import key_of, read_sparse_tile
from absorbed_mla.kernels.hopper.synchronize import synchronize
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS


@gluon.jit
def _gather(shared, tile, block, latent, k_rope, latent_s, rope_s):
    """Begin to copy a block of keys; rows that are no key become zeros."""
    C: gl.constexpr = shared.latent.shape[2]
    R: gl.constexpr = shared.k_rope.shape[2]
    layout: gl.constexpr = row_layout(SWIZZLED, gl.num_warps())
    key, there = key_of(tile.listed(block, gl.SliceLayout(1, layout)), tile)
    there = there[:, None]
    columns = gl.arange(0, SWIZZLED, gl.SliceLayout(0, layout))[None, :]
    offset = (key * latent_s)[:, None] + columns
    for column in gl.static_range(0, C, SWIZZLED):
        place = shared.latent.index(0).slice(column, SWIZZLED, dim=1)
        async_copy.async_copy_global_to_shared(place, latent + column + offset, mask=there)
    offset = (key * rope_s)[:, None] + columns
    for column in gl.static_range(0, R, SWIZZLED):
        place = shared.k_rope.index(0).slice(column, SWIZZLED, dim=1)
        async_copy.async_copy_global_to_shared(place, k_rope + column + offset, mask=there)
    async_copy.commit_group()


@gluon.jit
def _target(tile, block, dkv, first, length, batches, heads, WIDTH, IN_ORDER: gl.constexpr):
    """Where a block of keys gets its gradient."""
    layout: gl.constexpr = row_layout_of_results()
    entry = tile.listed(block, layout)
    key, there = key_of(entry, tile)
    if IN_ORDER:
        blocks = (heads + tile.HEADS - 1) // tile.HEADS
        place = (tile.number - first * batches).to(gl.int64) * length + block * KEYS
        row = (place + gl.arange(0, KEYS, layout)) * blocks + tile.head // tile.HEADS
    else:
        row = key * batches + tile.batch
    return KeyRows(dkv, row * WIDTH, there, IN_ORDER)


@gluon.jit
def _reduce_key_gradient(shared, i, target):
    """Give P^T dO + dS^T Q of the block, [64, C + R], to ``target``, some columns at a time.

    The addresses of scattered rows leave no registers for products that run meanwhile.
    """
    C: gl.constexpr = shared.latent.shape[2]
    zero = gl.zeros([KEYS, COLUMNS], gl.float32, key_accumulator(COLUMNS))
    for column in gl.static_range(0, C, COLUMNS):
        part = start_part(shared, i, column, zero)
        target.add(warpgroup_mma_wait(0, deps=[part]), column)
    target.add(warpgroup_mma_wait(0, deps=[start_rope_part(shared, i, zero)]), C)


@gluon.jit(do_not_specialize=["first", "length", "queries", "batches", "heads"])
def attend_sparse_backward(
    q_content,
    q_rope,
    grad_out,
    latent,
    k_rope,
    latent_s,
    latent_b,
    rope_s,
    rope_b,
    lse,
    delta,
    entries,
    counts,
    open_counts,
    dq_content,
    dq_rope,
    dkv,
    first,
    length,
    queries,
    batches,
    heads,
    scale,
    C: gl.constexpr,
    R: gl.constexpr,
    HEADS: gl.constexpr,
    IN_ORDER: gl.constexpr,
):
    """Gradients of every tile; one program for each tile, entry of the batch and group of heads.

    Args:
        q_content: Tensor map of [S_q, B, N, C] in boxes [64 / HEADS, 1, HEADS, C].
        q_rope: Of [S_q, B, N, R] in boxes [64 / HEADS, 1, HEADS, R].
        grad_out: As q_content.
        latent: [S_k, B, C]; rows begin at multiples of 16 bytes.
        k_rope: [S_k, B, R], likewise.
        latent_s: Stride of a key, like the next three a multiple of 16.
        latent_b: Of an entry of the batch.
        rope_s: Stride of a key in k_rope.
        rope_b: Of an entry of the batch.
        lse: fp32 [S_q, B, N], contiguous like all that follows.
        delta: fp32 [S_q, B, N].
        entries: int32 [tiles, B, L], see key_lists.py.
        counts: int32 [tiles, B].
        open_counts: int32 [tiles, B], see ``SparseTile``.
        dq_content: [S_q, B, N, C], written.
        dq_rope: [S_q, B, N, R], written.
        dkv: fp32 [S_k, B, C + R], added to; or fp32 or bf16 [tiles of the launch * B * L * blocks
            of heads, C + R], written; columns as in key_rows.py.
        first: Number of the launch's first tile.
        length: L.
        queries: S_q.
        batches: B.
        heads: N.
        scale: Of the scores.
        C: ``kv_lora_rank``.
        R: Width of k_rope.
        HEADS: Heads in a tile.
        IN_ORDER: Whether every entry of the lists has a row of its own in ``dkv``.
    """
    lists = entries, counts, open_counts
    tile = read_sparse_tile(lists, first, length, queries, batches, heads, HEADS)
    latent += tile.batch.to(gl.int64) * latent_b
    k_rope += tile.batch.to(gl.int64) * rope_b
    shared = allocate(q_content.dtype, C, R, LOADS_KEYS=False)
    blocks = (tile.keys + KEYS - 1) // KEYS
    load_rows(q_content, q_rope, grad_out, shared, tile)
    if blocks > 0:
        _gather(shared, tile, 0, latent, k_rope, latent_s, rope_s)
    rows_layout: gl.constexpr = gl.SliceLayout(1, key_accumulator(KEYS))
    row_lse, row_delta = read_statistics(lse, delta, tile, batches, heads, rows_layout)
    mbarrier.wait(shared.rows_full, 0)

    acc_content = gl.zeros([ROWS, C], gl.float32, key_accumulator(C))
    acc_rope = gl.zeros([ROWS, R], gl.float32, key_accumulator(R))
    for i in range(blocks):
        async_copy.wait_group(0)
        # What the warps have copied is for the tensor cores of all.
        finish_clearing()
        s, dp = start_scores(shared, i)
        p = write_probs(shared, tile, i, i * KEYS, s, row_lse, scale)
        write_grad_scores(shared, p, dp, row_delta, scale)
        acc_content, acc_rope = start_query_gradient(shared, i, acc_content, acc_rope)
        acc_content, acc_rope = warpgroup_mma_wait(0, deps=[acc_content, acc_rope])
        # Both warpgroups are done with the keys.
        synchronize()
        if i + 1 < blocks:
            _gather(shared, tile, i + 1, latent, k_rope, latent_s, rope_s)
        target = _target(tile, i, dkv, first, length, batches, heads, C + R, IN_ORDER)
        _reduce_key_gradient(shared, i, target)

    synchronize()
    store_rows(acc_content, shared.q_content, dq_content, tile, batches, heads, C)
    store_rows(acc_rope, shared.q_rope, dq_rope, tile, batches, heads, R)
