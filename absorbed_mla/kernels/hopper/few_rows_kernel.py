"""The decode kernel for few query rows over an FP8 cache: keys are the rows of its products.

A tile has 16 or 32 rows (heads of the new tokens of a request), where decode_kernel.py has 64, of
which few heads would leave most empty. A product of a warpgroup has 64 rows at least, so these are
keys, or columns of the latents, and the tile's rows are columns:

    S^T [64 keys, rows] = K [64, C + R] (Q^T)        O^T [C, rows] += V^T [C, 64] P^T [64, rows]

K and V are the same block in shared memory, read along its rows and along its columns. Queries and
P take little room; the rest is for FP8 rows on their way (fp8_pieces.py). Tiles, parts of the work
and what is written are those of decode_kernel.py. Roles:

* ``load_role``, one warp: copies queries and rows to shared memory by tensor maps (TMA).
* ``decode_role``, twice four warps: decodes blocks, pieces of 128 columns.
* ``_attend_role``, four warps: scores, softmax, output. The scores of a block are queued behind the
  product of P and the block before, so that the tensor cores idle only while a softmax is computed.

Barriers, in the terms of forward_kernel.py:

* ``q_full``, ``q_empty`` (per tile): the queries are there; their last scores are done.
* ``piece_full`` (per piece): it is there.
* ``scale_full`` (per block): all its scales are there.
* ``latents_full`` (per block and piece): it is decoded, hence its place in the ring is free.
* ``latents_empty`` (per block): the output has it.
* ``rope_full``, ``rope_empty`` (per block): k_rope is there; the scores are done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from absorbed_mla.kernels.hopper.decode_kernel import load_role
from absorbed_mla.kernels.hopper.decode_tile import Part
from absorbed_mla.kernels.hopper.few_rows_shared import GROUP, allocate_few_rows
from absorbed_mla.kernels.hopper.forward_kernel import LN_2
from absorbed_mla.kernels.hopper.forward_scores import count_blocks
from absorbed_mla.kernels.hopper.forward_shared import STAGES, clear_rows
from absorbed_mla.kernels.hopper.fp8_pieces import DECODE_WARPS, Fp8Pieces, decode_role
from absorbed_mla.kernels.hopper.layouts import accumulator_layout
from absorbed_mla.kernels.hopper.paged_keys import PagedKeys
from absorbed_mla.kernels.hopper.synchronize import synchronize
from absorbed_mla.kernels.hopper.tile import KEYS

# Registers of each thread of a role. At launch four warpgroups (the load role's warp counts as one)
# have 128 each.
_DECODE_REGISTERS = gl.constexpr(104)
_LOAD_REGISTERS = gl.constexpr(40)


@gluon.jit
def _attend_role(part, shared, whole, split, heads, scale, SPLIT: gl.constexpr):
    """Compute each tile's output and LSE."""
    begin, end = part.range()
    blocks = gl.to_tensor(0)
    for index in range(begin, end):
        tile = part.tile(index)
        o, top, total = _attend(tile, shared, scale, index - begin, blocks)
        blocks += count_blocks(tile)
        _store(part.tile(index), o, top, total, whole, split, heads, scale, SPLIT)


@gluon.jit
def _attend(tile, shared, scale, tiles, blocks):
    """Attention of a tile.

    Args:
        tile: The tile.
        shared: What ``allocate_few_rows`` gave.
        scale: Of the scores, times log2(e).
        tiles: How many the program has done before.
        blocks: Of these tiles.

    Returns:
        O^T before it is divided by the denominators, [C, ROWS] fp32, the rows' largest products and
        sums of exp2(scale * (product - largest)), [ROWS].
    """
    layout: gl.constexpr = accumulator_layout(shared.ROWS, 1)
    top = tile.first_top(gl.SliceLayout(0, layout))
    # Each thread sums what it has; the sums are added up at last.
    total = gl.zeros([KEYS, shared.ROWS], gl.float32, layout)
    o = gl.zeros([shared.C, shared.ROWS], gl.float32, layout)
    last = count_blocks(tile) - 1
    mbarrier.wait(shared.q_full.index(0), tiles & 1)
    s = _start_scores(shared, blocks, layout)
    s = _finish_scores(shared, s, blocks)
    for block in range(last):
        stage = (blocks + block) % STAGES
        if block >= tile.open_blocks():
            s = gl.where(tile.is_seen(block, layout), s, -float("inf"))
        top, total, factor = _softmax(shared, s, top, total, scale)
        o = _add_values(shared, o, factor, stage)
        s = _start_scores(shared, blocks + block + 1, layout)
        # One product, the first part of the scores, may be unfinished: the one before it is not.
        o = warpgroup_mma_wait(1, deps=[o])
        mbarrier.arrive(shared.latents_empty.index(stage))
        s = _finish_scores(shared, s, blocks + block + 1)
    mbarrier.arrive(shared.q_empty.index(0))
    stage = (blocks + last) % STAGES
    if tile.keys - last * KEYS < KEYS:
        clear_rows(shared.latents.index(stage), tile.keys - last * KEYS)
    s = gl.where(tile.is_seen(last, layout), s, -float("inf"))
    top, total, factor = _softmax(shared, s, top, total, scale)
    o = warpgroup_mma_wait(0, deps=[_add_values(shared, o, factor, stage)])
    mbarrier.arrive(shared.latents_empty.index(stage))
    return o, top, gl.sum(total, axis=0)


@gluon.jit
def _start_scores(shared, number, layout: gl.constexpr):
    """Queue the first piece's part of S^T = K Q^T, [64, ROWS] fp32, when it has been decoded."""
    s = gl.zeros([KEYS, shared.ROWS], gl.float32, layout)
    return _add_piece(shared, s, number, 0)


@gluon.jit
def _finish_scores(shared, s, number):
    """Queue the parts of the other pieces and of k_rope, each when it is there; then S^T is."""
    for column in gl.static_range(GROUP, shared.C, GROUP):
        s = _add_piece(shared, s, number, column)
    stage = number % STAGES
    queries = shared.q_rope.reshape([shared.ROWS, shared.R])
    keys = shared.k_rope.index(stage).reshape([KEYS, shared.R])
    shared.rope_ring.wait(number)
    s = warpgroup_mma(keys, queries.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    shared.rope_ring.release(number)
    return s


@gluon.jit
def _add_piece(shared, s, number, column: gl.constexpr):
    """Queue the part of the piece that begins at a column."""
    GROUPS: gl.constexpr = shared.C // GROUP
    stage = number % STAGES
    keys = shared.latents.index(stage).slice(column, GROUP, dim=1)
    queries = shared.q_content.reshape([shared.ROWS, shared.C]).slice(column, GROUP, dim=1)
    mbarrier.wait(shared.latents_full.index(stage * GROUPS + column // GROUP), number // STAGES & 1)
    return warpgroup_mma(keys, queries.permute((1, 0)), s, use_acc=column > 0, is_async=True)


@gluon.jit
def _softmax(shared, s, top, total, scale):
    """One step of the online softmax, P to shared memory; see ``softmax`` in forward_scores.py.

    Returns:
        The new top [ROWS] and total [64, ROWS], and the factor exp2(scale * (old top - new top)).
    """
    old_top = top
    top = gl.maximum(top, gl.max(s, axis=0))
    base = gl.where(top == -float("inf"), 0.0, top)
    factor = gl.exp2((old_top - base) * scale)
    p = gl.exp2(s * scale - (base * scale)[None, :])
    # No product that reads the P before is running: S was queued behind it.
    shared.probs.store(p.to(shared.probs.dtype))
    fence_async_shared()
    synchronize()
    return top, total * factor[None, :] + p, factor


@gluon.jit
def _add_values(shared, o, factor, stage):
    """Queue O^T = O^T * factor + V^T P^T."""
    values = shared.latents.index(stage).permute((1, 0))
    return warpgroup_mma(values, shared.probs, o * factor[None, :], is_async=True)


@gluon.jit
def _store(tile, o, top, total, whole, split, heads, scale, SPLIT: gl.constexpr):
    """Write O and the LSE of the tile's rows where they belong."""
    C: gl.constexpr = o.shape[0]
    layout: gl.constexpr = accumulator_layout(o.shape[1], 1)
    rows: gl.constexpr = gl.SliceLayout(0, layout)
    o = o * gl.where(total > 0, 1 / total, 0.0)[None, :]
    lse = gl.where(total > 0, top * scale + gl.log2(total), -float("inf"))
    row, inside = tile.rows(1, heads, rows)
    column = gl.arange(0, C, gl.SliceLayout(1, layout))
    # Eight lanes write eight neighbouring columns of a row, others those of other rows.
    if SPLIT:
        place, waits = tile.place_rows(rows), inside & (tile.place >= 0)
        gl.store(split[1] + place, lse, mask=waits)
        pointers = split[0] + (place * C)[None, :] + column[:, None]
        gl.store(pointers, o, mask=waits[None, :])
        inside &= tile.place < 0
    gl.store(tile.results(whole[1], heads) + row, lse * LN_2, mask=inside)
    pointers = tile.results(whole[0], heads * C) + (row * C)[None, :] + column[:, None]
    gl.store(pointers, o.to(whole[0].dtype.element_ty), mask=inside[None, :])


@gluon.jit(
    do_not_specialize=[
        "block_units",
        "row_units",
        "together",
        "block_size",
        "table_stride",
        "heads",
        "head_blocks",
    ],
    do_not_specialize_on_alignment=["block_table"],
)
def attend_few_rows(
    q_content,
    q_rope,
    values,
    k_rope,
    scales,
    words,
    block_units,
    row_units,
    together,
    tiles,
    starts,
    block_table,
    out,
    lse,
    split_out,
    split_lse,
    block_size,
    table_stride,
    heads,
    head_blocks,
    scale,
    HEADS: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    SPLIT: gl.constexpr,
    ROWS: gl.constexpr,
    PIECES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """As ``attend_decode``, over rows in FP8; tiles and boxes of queries have ``ROWS`` rows.

    Args:
        values: Tensor map of [block_size, blocks, C / 4] int32, four values in a word, in boxes
            [keys that lie together, 1, 32].
        k_rope: Of [block_size, blocks, R] in boxes [keys that lie together, 1, R].
        scales: Of [block_size, blocks, C / 128] fp32, likewise.
        words: As ``Fp8Pieces`` has it, like the next three.
        ROWS: Of a tile.
        PIECES: Pieces that are on their way.
        AHEAD: Blocks that are on their way to the L2 cache.
    """
    part = Part(tiles, starts, head_blocks, HEADS, ROWS)
    begin, end = part.range()
    if begin < end:
        shared = allocate_few_rows(q_content, q_rope, values, scales, k_rope, C, R, ROWS, PIECES)
        keys = PagedKeys(values, k_rope, block_table, block_size, table_stride)
        pieces = Fp8Pieces(keys, scales, words, block_units, row_units, together, AHEAD)
        queries = q_content, q_rope
        whole, waiting = (out, lse), (split_out, split_lse)
        gl.warp_specialize(
            [
                (_attend_role, (part, shared, whole, waiting, heads, scale, SPLIT)),
                (decode_role, (part, shared, 0)),
                (decode_role, (part, shared, 1)),
                (load_role, (part, shared, queries, pieces)),
            ],
            # Warps of the roles but the first, which has the launch's four.
            [DECODE_WARPS, DECODE_WARPS, 1],
            [_DECODE_REGISTERS, _DECODE_REGISTERS, _LOAD_REGISTERS],
        )
