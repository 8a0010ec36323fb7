"""The forward kernel: a tile of 64 rows (tokens x heads) attends to its keys, 64 at a time.

Latents are keys and values at once, so a block of 64 keys is loaded once, [64, C] latent and
[64, R] k_rope, and used by two products. Shared memory holds two blocks (stages) and the queries;
the output, 64 x C in fp32, fills the registers of two warpgroups. One program is one tile, and its
warps have three roles:

* ``_score_role``, four warps: scores S = Q K^T, online softmax (arXiv:2205.14135), P to shared
  memory, then the left half of the columns of O = O * factor + P V. The next block's S is queued
  behind this product, so that the tensor cores idle only while a softmax is computed.
* ``_value_role``, four warps: the right half of O, from the P and factors of the first role.
* ``_load_role``, one warp: tensor-map copies (TMA) of queries and blocks.

P takes the place of its block's k_rope, which only S needed: 227 KiB leave no other room for one
P per stage.

Barriers, each passed once per block of a stage except ``q_full`` and ``norm_full``:

* ``q_full``: the queries are there.
* ``k_full``: a chunk of the block's latent columns is there; S begins with the first.
* ``rope_full``: its k_rope is there.
* ``p_full``: P and the factor of the rows are there.
* ``left_empty``, ``right_empty``: the product with this half of the columns is done; the half can
  be loaded anew, k_rope (P) after both.
* ``norm_full``: the reciprocal of the softmax denominators is there.
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

from absorbed_mla.kernels.hopper.forward_shared import STAGES, allocate, chunk_full, clear_rows
from absorbed_mla.kernels.hopper.forward_tile import KEYS, ROWS, read_tile, store_half

LOG_2 = gl.constexpr(0.6931471805599453)
# Registers of each thread of a role; the score role gets what is left of 504: 248.
VALUE_REGISTERS = gl.constexpr(216)
LOAD_REGISTERS = gl.constexpr(40)


@gluon.constexpr_function
def _accumulator_layout(columns):
    """What a warpgroup's product with ``columns`` columns leaves in the registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _load_role(tile, shared, q_content, q_rope, latent, k_rope):
    HALF: gl.constexpr = shared.LATENT // 2
    full = shared.q_full.index(0)
    mbarrier.expect(full, q_content.block_type.nbytes + q_rope.block_type.nbytes)
    position = [tile.query_start, tile.batch, tile.head, 0]
    tma.async_copy_global_to_shared(q_content, position, full, shared.q_content)
    tma.async_copy_global_to_shared(q_rope, position, full, shared.q_rope)
    for block in range(tile.blocks()):
        stage = block % STAGES
        parity = (block // STAGES & 1) ^ 1
        key = tile.key_start + block * KEYS
        mbarrier.wait(shared.left_empty.index(stage), parity)
        for column in gl.static_range(0, HALF, shared.CHUNK):
            _load_chunk(tile, shared, shared.left, latent, stage, key, column)
        mbarrier.wait(shared.right_empty.index(stage), parity)
        for column in gl.static_range(HALF, shared.LATENT, shared.CHUNK):
            _load_chunk(tile, shared, shared.right, latent, stage, key, column)
        full = shared.rope_full.index(stage)
        mbarrier.expect(full, k_rope.block_type.nbytes)
        rope = shared.k_rope(stage)
        tma.async_copy_global_to_shared(k_rope, [key, tile.batch, 0], full, rope)


@gluon.jit
def _load_chunk(tile, shared, half, latent, stage, key, column: gl.constexpr):
    """Load the columns from ``column`` on into their place in a half."""
    chunk = half.index(stage).slice(column % (shared.LATENT // 2), shared.CHUNK, dim=2)
    full = chunk_full(shared, stage, column)
    mbarrier.expect(full, latent.block_type.nbytes)
    tma.async_copy_global_to_shared(latent, [key, tile.batch, column], full, chunk)


@gluon.jit
def _score_role(tile, shared, out, lse, batches, heads, scale):
    HALF: gl.constexpr = shared.LATENT // 2
    layout: gl.constexpr = _accumulator_layout(KEYS)
    o_layout: gl.constexpr = _accumulator_layout(HALF)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    top = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    o = gl.zeros([ROWS, HALF], gl.float32, o_layout)
    last = tile.blocks() - 1
    mbarrier.wait(shared.q_full.index(0), 0)
    s = _start_scores(shared, 0, 0, layout)
    s = warpgroup_mma_wait(0, deps=[_finish_scores(shared, s, 0, 0)])
    for block in range(last):
        stage = block % STAGES
        if block >= tile.open_blocks():
            s = _mask(s, tile, block, layout)
        top, total, factor = _softmax(shared, s, top, total, stage, scale)
        o = o * gl.convert_layout(factor, o_rows)[:, None]
        values = shared.left.index(stage).reshape([KEYS, HALF])
        o = warpgroup_mma(shared.probs(stage), values, o, is_async=True)
        parity = (block + 1) // STAGES & 1
        s = _start_scores(shared, stage ^ 1, parity, layout)
        # One product, the first part of the scores, may be unfinished: the one before it is not.
        o = warpgroup_mma_wait(1, deps=[o])
        mbarrier.arrive(shared.left_empty.index(stage))
        s = warpgroup_mma_wait(0, deps=[_finish_scores(shared, s, stage ^ 1, parity)])
    stage = last % STAGES
    values = shared.left.index(stage).reshape([KEYS, HALF])
    # No product was queued behind the last block's scores.
    clear_rows(values, tile.keys - last * KEYS)
    s = _mask(s, tile, last, layout)
    top, total, factor = _softmax(shared, s, top, total, stage, scale)
    norm = gl.where(total > 0, 1 / total, 0.0)
    shared.norm.store(norm)
    mbarrier.arrive(shared.norm_full.index(0))
    o = o * gl.convert_layout(factor, o_rows)[:, None]
    o = warpgroup_mma(shared.probs(stage), values, o, is_async=True)
    index, inside = tile.rows(batches, heads, gl.SliceLayout(1, layout))
    value = gl.where(total > 0, (top * scale + gl.log2(total)) * LOG_2, -float("inf"))
    gl.store(lse + index, value, mask=inside)
    o = warpgroup_mma_wait(0, deps=[o])
    o = o * gl.convert_layout(norm, o_rows)[:, None]
    store_half(out, tile, o, batches, heads, 0)


@gluon.jit
def _start_scores(shared, stage, parity, layout: gl.constexpr):
    """Queue the first chunk's part of S = Q K^T, [64, 64] fp32."""
    s = gl.zeros([ROWS, KEYS], gl.float32, layout)
    return _add_chunk(shared, s, stage, parity, 0)


@gluon.jit
def _finish_scores(shared, s, stage, parity):
    """Queue the other chunks' parts and that of the rotary part."""
    for column in gl.static_range(shared.CHUNK, shared.LATENT, shared.CHUNK):
        s = _add_chunk(shared, s, stage, parity, column)
    queries = shared.q_rope.reshape([ROWS, shared.ROPE])
    keys = shared.k_rope(stage).reshape([KEYS, shared.ROPE])
    mbarrier.wait(shared.rope_full.index(stage), parity)
    return warpgroup_mma(queries, keys.permute((1, 0)), s, is_async=True)


@gluon.jit
def _add_chunk(shared, s, stage, parity, column: gl.constexpr):
    """Queue the part of the columns from ``column`` on."""
    HALF: gl.constexpr = shared.LATENT // 2
    half = shared.left if column < HALF else shared.right
    keys = half.index(stage).reshape([KEYS, HALF]).slice(column % HALF, shared.CHUNK, dim=1)
    queries = shared.q_content.reshape([ROWS, shared.LATENT]).slice(column, shared.CHUNK, dim=1)
    mbarrier.wait(chunk_full(shared, stage, column), parity)
    return warpgroup_mma(queries, keys.permute((1, 0)), s, use_acc=column > 0, is_async=True)


@gluon.jit
def _mask(s, tile, block, layout: gl.constexpr):
    """Set the scores of keys that a row does not see to -inf."""
    key = block * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
    seen = key[None, :] <= tile.last_keys(gl.SliceLayout(1, layout))[:, None]
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def _softmax(shared, s, top, total, stage, scale):
    """One step of the online softmax; P and the factor go to shared memory.

    Args:
        s: Scores [64, 64].
        top: The rows' largest scores so far, [64].
        total: Sum of exp(score - top) so far, [64].
        scale: Of the scores, times log2(e).

    Returns:
        The new top and total, and exp(old top - new top).
    """
    old_top = top
    top = gl.maximum(top, gl.max(s, axis=1))
    # -inf - -inf would be NaN in rows that have seen no key yet.
    base = gl.where(top == -float("inf"), 0.0, top) * scale
    factor = gl.exp2(old_top * scale - base)
    p = gl.exp2(s * scale - base[:, None])
    shared.factor.index(stage).store(factor)
    shared.probs(stage).store(p.to(shared.rope.dtype))
    fence_async_shared()
    mbarrier.arrive(shared.p_full.index(stage))
    return top, total * factor + gl.sum(p, axis=1), factor


@gluon.jit
def _value_role(tile, shared, out, batches, heads):
    HALF: gl.constexpr = shared.LATENT // 2
    layout: gl.constexpr = _accumulator_layout(HALF)
    o = gl.zeros([ROWS, HALF], gl.float32, layout)
    last = tile.blocks() - 1
    for block in range(last + 1):
        stage = block % STAGES
        values = shared.right.index(stage).reshape([KEYS, HALF])
        mbarrier.wait(shared.p_full.index(stage), block // STAGES & 1)
        if block == last:
            clear_rows(values, tile.keys - last * KEYS)
        factor = shared.factor.index(stage).load(gl.SliceLayout(1, layout))
        o = o * factor[:, None]
        o = warpgroup_mma(shared.probs(stage), values, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(shared.right_empty.index(stage))
    mbarrier.wait(shared.norm_full.index(0), 0)
    norm = shared.norm.load(gl.SliceLayout(1, layout))
    store_half(out, tile, o * norm[:, None], batches, heads, HALF)


@gluon.jit(do_not_specialize=["batches", "heads"])
def attend_forward(
    q_content,
    q_rope,
    latent,
    k_rope,
    tiles,
    out,
    lse,
    batches,
    heads,
    scale,
    HEADS: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
):
    """Attention of every tile; one program for each tile, entry of the batch and group of heads.

    Args:
        q_content: Tensor map of [S_q, B, N, C] in boxes [64 / HEADS, 1, HEADS, C].
        q_rope: Of [S_q, B, N, R] in boxes [64 / HEADS, 1, HEADS, R].
        latent: Of [S_k, B, C] in boxes [64, 1, columns that arrive together].
        k_rope: Of [S_k, B, R] in boxes [64, 1, R].
        tiles: int32 [tiles, 5], see ``query_tiles`` in tiles.py.
        out: [S_q, B, N, C], contiguous.
        lse: [S_q, B, N] fp32, contiguous.
        batches: B.
        heads: N.
        scale: Of the scores, positive, times log2(e).
        HEADS: Heads in a tile.
        LATENT: C.
        ROPE: R.
    """
    tile = read_tile(tiles, batches, heads, HEADS)
    shared = allocate(q_content, q_rope, latent, k_rope, LATENT, ROPE)
    gl.warp_specialize(
        [
            (_score_role, (tile, shared, out, lse, batches, heads, scale)),
            (_value_role, (tile, shared, out, batches, heads)),
            (_load_role, (tile, shared, q_content, q_rope, latent, k_rope)),
        ],
        [4, 1],
        [VALUE_REGISTERS, LOAD_REGISTERS],
    )
