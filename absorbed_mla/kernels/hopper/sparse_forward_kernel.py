"""The sparse forward kernel: the forward kernel over lists of keys.

Roles, shared memory, barriers and arithmetic are those of forward_kernel.py. Different is how keys
come: tensor maps load neighbouring rows, so here the load role is four warps that copy rows by
``cp.async``, 16 bytes a thread and 128 contiguous ones of every row. All copies of a block are
asked for before the first is waited for, and so are the next block's entries; its copies begin as
soon as the products leave room. Rows that are no key are zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from absorbed_mla.kernels.hopper.forward_kernel import (
    LN_2,
    compute_right,
    finish_left,
    start_left,
    store_half,
)
from absorbed_mla.kernels.hopper.forward_scores import count_blocks
from absorbed_mla.kernels.hopper.forward_shared import (
    STAGES,
    allocate_blocks,
    announce,
    chunk_full,
    load_queries,
)
from absorbed_mla.kernels.hopper.layouts import (
    SWIZZLED,
    accumulator_layout,
    block_layout,
    row_layout,
)
from absorbed_mla.kernels.hopper.ring import empty_position
from absorbed_mla.kernels.hopper.sparse_tile import key_of, read_sparse_tile
from absorbed_mla.kernels.hopper.tile import KEYS

# Registers of each thread of a role, as in forward_kernel.py; the score role gets 232.
VALUE_REGISTERS = gl.constexpr(208)
LOAD_REGISTERS = gl.constexpr(64)
LOAD_WARPS = gl.constexpr(4)


@gluon.jit
def _load_role(tile, shared, entry, q_content, q_rope, latent, k_rope, strides):
    """Load the queries, then each block as soon as the block before last is done with its stage."""
    HALF: gl.constexpr = shared.C // 2
    layout: gl.constexpr = row_layout(SWIZZLED, LOAD_WARPS)
    load_queries(tile, entry, shared, q_content, q_rope)
    latent_s, latent_b, rope_s, rope_b = strides
    latent += entry.to(gl.int64) * latent_b
    k_rope += entry.to(gl.int64) * rope_b
    listed = tile.listed(0, gl.SliceLayout(1, layout))
    for block in range(count_blocks(tile)):
        stage, parity = empty_position(block, STAGES)
        key, there = key_of(listed, tile)
        row = (key * latent_s)[:, None]
        mbarrier.wait(shared.left_empty.index(stage), parity)
        left = shared.left.index(stage).reshape([KEYS, HALF])
        for column in gl.static_range(0, HALF, shared.CHUNK):
            gather_columns(left, column, shared.CHUNK, latent + column, row, there)
        mbarrier.wait(shared.right_empty.index(stage), parity)
        right = shared.right.index(stage).reshape([KEYS, HALF])
        for column in gl.static_range(0, HALF, shared.CHUNK):
            gather_columns(right, column, shared.CHUNK, latent + HALF + column, row, there)
        rope = shared.k_rope(stage).reshape([KEYS, shared.R])
        gather_columns(rope, 0, shared.R, k_rope, (key * rope_s)[:, None], there)
        # The next block's are there when this block has come.
        listed = tile.listed(block + 1, gl.SliceLayout(1, layout))
        for column in gl.static_range(0, shared.C, shared.CHUNK):
            # As many as follow this chunk, k_rope among them, may be under way.
            async_copy.wait_group((shared.C - column) // shared.CHUNK)
            announce(chunk_full(shared, stage, column))
        async_copy.wait_group(0)
        announce(shared.rope_full.index(stage))


@gluon.jit
def gather_columns(target, column: gl.constexpr, COLUMNS: gl.constexpr, source, row, there):
    """Begin to copy columns of a block's rows to those from ``column`` on, as one group."""
    WIDTH: gl.constexpr = COLUMNS if COLUMNS < SWIZZLED else SWIZZLED
    layout: gl.constexpr = row_layout(SWIZZLED, LOAD_WARPS)
    offset = row + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    for part in gl.static_range(0, COLUMNS, WIDTH):
        place = target.slice(column + part, WIDTH, dim=1)
        async_copy.async_copy_global_to_shared(place, source + part + offset, mask=there[:, None])
    async_copy.commit_group()


@gluon.jit
def _score_role(tile, shared, out, lse, batches, heads, scale):
    """Compute all scores, the LSE, and the left half of the output."""
    layout: gl.constexpr = accumulator_layout(KEYS, 1)
    o, top, total, norm, _ = start_left(tile, shared, scale)
    index, inside = tile.rows(batches, heads, gl.SliceLayout(1, layout))
    value = gl.where(total > 0, (top * scale + gl.log2(total)) * LN_2, -float("inf"))
    gl.store(lse + index, value, mask=inside)
    store_half(out, tile, finish_left(shared, o, norm, count_blocks(tile)), batches, heads, 0)


@gluon.jit
def _value_role(tile, shared, out, batches, heads):
    """Compute the right half of the output."""
    store_half(out, tile, compute_right(tile, shared), batches, heads, shared.C // 2)


@gluon.jit(do_not_specialize=["length", "queries", "batches", "splits", "heads"])
def attend_sparse_forward(
    q_content,
    q_rope,
    latent,
    k_rope,
    latent_s,
    latent_b,
    rope_s,
    rope_b,
    entries,
    counts,
    open_counts,
    out,
    lse,
    length,
    queries,
    batches,
    splits,
    heads,
    scale,
    HEADS: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """Attention of every tile; one program for each tile, entry of the batch and group of heads.

    Args:
        q_content: Tensor map of [S_q, B, N, C] in boxes [64 / HEADS, 1, HEADS, C].
        q_rope: Of [S_q, B, N, R] in boxes [64 / HEADS, 1, HEADS, R].
        latent: [S_k, B, C]; rows begin at multiples of 16 bytes.
        k_rope: [S_k, B, R], likewise.
        latent_s: Stride of a key, like the next three a multiple of 16.
        latent_b: Of an entry of the batch.
        rope_s: Stride of a key in k_rope.
        rope_b: Of an entry of the batch.
        entries: int32 [tiles, B, L], see key_lists.py; contiguous like all that follows.
        counts: int32 [tiles, B].
        open_counts: int32 [tiles, B], see ``SparseTile``.
        out: [S_q, B, N, C].
        lse: [S_q, B, N] fp32.
        length: L.
        queries: S_q.
        batches: B; with splits their number, for a query and keys of one entry.
        splits: Lists of every token, each with an output of its own.
        heads: N.
        scale: Of the scores, positive, times log2(e).
        HEADS: Heads in a tile.
        C: ``kv_lora_rank``.
        R: Width of k_rope.
        CHUNK: Columns of the latents that products wait for together.
    """
    lists = entries, counts, open_counts
    tile = read_sparse_tile(lists, 0, length, queries, batches, heads, HEADS)
    layout: gl.constexpr = block_layout(C)
    rope_layout: gl.constexpr = block_layout(R)
    shared = allocate_blocks(q_content, q_rope, C, R, CHUNK, layout, rope_layout)
    strides = latent_s, latent_b, rope_s, rope_b
    entry = tile.batch // splits
    gl.warp_specialize(
        [
            (_score_role, (tile, shared, out, lse, batches, heads, scale)),
            (_value_role, (tile, shared, out, batches, heads)),
            (_load_role, (tile, shared, entry, q_content, q_rope, latent, k_rope, strides)),
        ],
        [4, LOAD_WARPS],  # warps of the roles but the first, which has the launch's four
        [VALUE_REGISTERS, LOAD_REGISTERS],
    )
