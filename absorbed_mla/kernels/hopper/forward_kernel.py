"""The forward kernel: tiles of 64 rows (tokens x heads) attend to their keys, 64 at a time.

A program runs on each multiprocessor and computes tiles one after the other. Latents are keys and
values at once, so a block of 64 keys is loaded once, [64, C] latent and [64, R] k_rope, and used by
two products. Shared memory holds two blocks (in two stages, by turns) and the queries; the output
O, 64 x C in fp32, fills the registers of two warpgroups. The warps have three roles:

* ``_load_role``, one warp: copies queries and blocks to shared memory by tensor maps (TMA), also
  those of the next tile while the others finish one.
* ``_score_role``, four warps: scores S = Q K^T, online softmax (arXiv:2205.14135) with P to shared
  memory, and the left half of the columns of O = O * factor + P V, with P from registers.
* ``_value_role``, four warps: the right half of O, from the P and the factors of the score role.

What the two compute for blocks 0, 1, ..; products queued together run one after the other:

    score role   S 0 | softmax 0 | PV 0 left, S 1 | softmax 1  | PV 1 left, S 2 | softmax 2  | ..
    value role                                    | PV 0 right |                | PV 1 right | ..

PV right could begin beside PV left, but then it would delay S and the tensor cores would idle while
a softmax is computed. So it waits until all of S but k_rope's part is done, and runs meanwhile. The
kernels over paged and listed keys, which share this code, let it begin at once (``RIGHT_WAITS``):
their keys take longer to come, and PV right of a block would wait for the next block's.

The factor is 1 but where a row's largest score has grown much (see ``online_softmax``); O is
multiplied only by factors of which some are not 1.

P takes the place of its block's k_rope, which only S needed: 227 KiB leave no other room for one
P per stage.

Barriers. ``.._full`` is passed when data has come, ``.._empty`` when it is no longer needed:

* ``q_full`` (per tile): the queries are there.
* ``q_empty`` (per tile): all scores have been computed.
* ``k_full`` (per block and chunk): a chunk of the latents' columns is there; S begins with the
  first.
* ``rope_full`` (per block): k_rope is there.
* ``p_full`` (per block): P and the factors are there, hence S is done with the latents and k_rope.
* ``right_go`` (per block): PV right may begin.
* ``left_empty``, ``right_empty`` (per block): PV is done with this half of the latents' columns, so
  that the half can be loaded anew; after both, so can k_rope, where P was.
* ``norm_full`` (per tile): the reciprocals of the softmax's denominators are there.
* ``norm_empty`` (per tile): the value role has read them.

A wait names the parity of the phase that it waits for: block i, counted on from tile to tile, is
phase i // 2 of its stage. The phase before the first, which the load role names for a stage not
used yet, counts as passed.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from absorbed_mla.kernels.hopper.forward_scores import (
    count_blocks,
    finish_scores,
    hide,
    rope_queries,
    softmax,
    some_change,
    start_scores,
)
from absorbed_mla.kernels.hopper.forward_shared import (
    STAGES,
    allocate,
    chunk_full,
    clear_rows,
    load_queries,
)
from absorbed_mla.kernels.hopper.layouts import accumulator_layout, sector_layout
from absorbed_mla.kernels.hopper.ring import empty_position, ring_position
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS
from absorbed_mla.kernels.hopper.tile_scheduler import ProgramTiles

LN_2 = gl.constexpr(math.log(2))
# Registers of each thread of a role. At launch three warpgroups (the load role's warp counts as
# one) have 168 each; the score role gets what the others leave of these 504: 248.
VALUE_REGISTERS = gl.constexpr(216)
LOAD_REGISTERS = gl.constexpr(40)


@gluon.jit
def _load_role(tiles, shared, q_content, q_rope, latent, k_rope):
    """Load each tile's queries, then its blocks, as soon as there is room."""
    blocks = gl.to_tensor(0)
    for turn in range(tiles.count()):
        tile = tiles.tile(turn)
        load_queries(tile, tile.batch, shared, q_content, q_rope, turn)
        count = count_blocks(tile)
        for block in range(count):
            _load_block(tile, shared, latent, k_rope, block, blocks + block)
        blocks += count


@gluon.jit
def _load_block(tile, shared, latent, k_rope, block, number):
    """Load a block, the program's ``number``-th, as soon as the block before last has left."""
    HALF: gl.constexpr = shared.C // 2
    stage, parity = empty_position(number, STAGES)
    key = tile.key_start + block * KEYS
    mbarrier.wait(shared.left_empty.index(stage), parity)
    for column in gl.static_range(0, HALF, shared.CHUNK):
        _load_chunk(tile, shared, shared.left, latent, stage, key, column)
    mbarrier.wait(shared.right_empty.index(stage), parity)
    for column in gl.static_range(HALF, shared.C, shared.CHUNK):
        _load_chunk(tile, shared, shared.right, latent, stage, key, column)
    full = shared.rope_full.index(stage)
    mbarrier.expect(full, k_rope.block_type.nbytes)
    rope = shared.k_rope(stage)
    tma.async_copy_global_to_shared(k_rope, [key, tile.batch, 0], full, rope)


@gluon.jit
def _load_chunk(tile, shared, half, latent, stage, key, column: gl.constexpr):
    """Load the columns from ``column`` on into their place in a half."""
    chunk = half.index(stage).slice(column % (shared.C // 2), shared.CHUNK, dim=2)
    full = chunk_full(shared, stage, column)
    mbarrier.expect(full, latent.block_type.nbytes)
    tma.async_copy_global_to_shared(latent, [key, tile.batch, column], full, chunk)


@gluon.jit
def _score_role(tiles, shared, out, lse, largest, scale, RECORD: gl.constexpr):
    """Compute each tile's scores, LSE and, if wanted, largest scores, and the left half of O."""
    rows: gl.constexpr = gl.SliceLayout(1, accumulator_layout(KEYS, 1))
    blocks = gl.to_tensor(0)
    for turn in range(tiles.count()):
        tile = tiles.tile(turn)
        o, top, total, norm, most = start_left(tile, shared, scale, turn, blocks, RECORD)
        blocks += count_blocks(tile)
        tile = tiles.tile(turn)
        index, inside = tile.rows(tiles.batches, tiles.heads, rows)
        value = gl.where(total > 0, (top * scale + gl.log2(total)) * LN_2, -float("inf"))
        gl.store(lse + index, value, mask=inside)
        if RECORD:
            gl.store(largest + index, most * (scale * LN_2), mask=inside)
        o = finish_left(shared, o, norm, blocks)
        store_half(out, tile, o, tiles.batches, tiles.heads, 0)


@gluon.jit
def start_left(tile, shared, scale, tiles=0, blocks=0, RECORD: gl.constexpr = False):
    """Queue all products of scores and of the left half of the output, and tell the value role.

    Args:
        tile: With ``keys``, ``sees``, ``open_blocks`` and ``first_top`` as in ``Tile``.
        shared: What ``allocate`` gave.
        scale: Of the scores, times log2(e).
        tiles: How many the program has done before.
        blocks: Of these tiles.
        RECORD: Whether the rows' largest products are wanted.

    Returns:
        The half [64, C / 2] whose last product is running, the rows' references and sums of
        exp2(scale * (product - reference)), by what ``finish_left`` multiplies the half, and the
        largest products, each [64]; without RECORD, the last are others.
    """
    HALF: gl.constexpr = shared.C // 2
    layout: gl.constexpr = accumulator_layout(KEYS, 1)
    top = tile.first_top(gl.SliceLayout(1, layout))
    most = top
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    o = gl.zeros([ROWS, HALF], gl.float32, accumulator_layout(HALF, 1))
    last = count_blocks(tile) - 1
    mbarrier.wait(shared.q_full.index(0), tiles & 1)
    q_rope = rope_queries(shared, layout)
    stage, parity = ring_position(blocks, STAGES)
    s = start_scores(shared, stage, parity, layout)
    s = finish_scores(shared, s, q_rope, stage, parity)
    s = warpgroup_mma_wait(0, deps=[s])
    for block in range(last):
        s, o, top, total, most = next_left(
            tile, shared, s, o, top, total, most, q_rope, scale, blocks, block, RECORD
        )
        s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(shared.q_empty.index(0))
    stage = (blocks + last) % STAGES
    values = shared.left.index(stage).reshape([KEYS, HALF])
    # No product that is still running reads them: none was queued behind the last block's scores.
    clear_rows(values, tile.keys - last * KEYS)
    s = hide(s, tile, last, layout)
    if RECORD:
        most = gl.maximum(most, gl.max(s, axis=1))
    top, total, factor, probs = softmax(shared, s, top, total, stage, scale)
    if shared.RIGHT_WAITS:
        mbarrier.arrive(shared.right_go.index(stage))
    norm = gl.where(total > 0, 1 / total, 0.0)
    mbarrier.wait(shared.norm_empty.index(0), (tiles & 1) ^ 1)
    shared.norm.store(norm)
    mbarrier.arrive(shared.norm_full.index(0))
    return add_left(shared, o, factor, probs, stage), top, total, norm, most


@gluon.jit
def next_left(
    tile, shared, s, o, top, total, most, q_rope, scale, blocks, block, RECORD: gl.constexpr = False
):
    """Add a block to the left half, and queue the scores of the next one.

    Args:
        tile: As in ``start_left``, like all that is not below.
        s: Products of the block's scores.
        o: The half, of the blocks before, as the next three are.
        top: References.
        total: Sums.
        most: Largest products.
        q_rope: Of ``rope_queries``.
        block: Of the tile.

    Returns:
        The first five with the block; ``s`` of the next block is being computed.
    """
    layout: gl.constexpr = accumulator_layout(KEYS, 1)
    stage = (blocks + block) % STAGES
    if block >= tile.open_blocks():
        s = hide(s, tile, block, layout)
    if RECORD:
        most = gl.maximum(most, gl.max(s, axis=1))
    top, total, factor, probs = softmax(shared, s, top, total, stage, scale)
    o = add_left(shared, o, factor, probs, stage)
    parity = (blocks + block + 1) // STAGES & 1
    s = start_scores(shared, stage ^ 1, parity, layout)
    # One product, the first part of the scores, may be unfinished: the one before it is not.
    o = warpgroup_mma_wait(1, deps=[o])
    mbarrier.arrive(shared.left_empty.index(stage))
    s = finish_scores(shared, s, q_rope, stage ^ 1, parity)
    if shared.RIGHT_WAITS:
        # Likewise k_rope's part.
        o = warpgroup_mma_wait(1, deps=[o])
        mbarrier.arrive(shared.right_go.index(stage))
    return s, o, top, total, most


@gluon.jit
def add_left(shared, o, factor, probs, stage):
    """Rescale the left half and queue the product of a block."""
    HALF: gl.constexpr = shared.C // 2
    layout: gl.constexpr = accumulator_layout(HALF, 1)
    if some_change(shared, stage):
        o = o * gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None]
    values = shared.left.index(stage).reshape([KEYS, HALF])
    if shared.IN_REGISTERS > 0:
        operand = gl.convert_layout(probs, gl.DotOperandLayout(0, layout, 2))
    else:
        operand = shared.probs(stage)
    return warpgroup_mma(operand, values, o, is_async=True)


@gluon.jit
def finish_left(shared, o, norm, blocks):
    """The left half when its last product, of the program's ``blocks``-th block, is done."""
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(shared.left_empty.index((blocks - 1) % STAGES))
    HALF: gl.constexpr = shared.C // 2
    o_rows: gl.constexpr = gl.SliceLayout(1, accumulator_layout(HALF, 1))
    return o * gl.convert_layout(norm, o_rows)[:, None]


@gluon.jit
def _value_role(tiles, shared, out):
    """Compute the right half of each tile's output."""
    blocks = gl.to_tensor(0)
    for turn in range(tiles.count()):
        tile = tiles.tile(turn)
        o = compute_right(tile, shared, turn, blocks)
        blocks += count_blocks(tile)
        tile = tiles.tile(turn)
        store_half(out, tile, o, tiles.batches, tiles.heads, shared.C // 2)


@gluon.jit
def compute_right(tile, shared, tiles=0, blocks=0):
    """The right half of the output, [64, C / 2], from what the score role tells, as it counts."""
    HALF: gl.constexpr = shared.C // 2
    layout: gl.constexpr = accumulator_layout(HALF, 1)
    o = gl.zeros([ROWS, HALF], gl.float32, layout)
    last = count_blocks(tile) - 1
    for block in range(last + 1):
        stage, parity = ring_position(blocks + block, STAGES)
        values = shared.right.index(stage).reshape([KEYS, HALF])
        mbarrier.wait(shared.p_full.index(stage), parity)
        if block == last:
            clear_rows(values, tile.keys - last * KEYS)
        if some_change(shared, stage):
            o = o * shared.factor.index(stage).load(gl.SliceLayout(1, layout))[:, None]
        if shared.RIGHT_WAITS:
            mbarrier.wait(shared.right_go.index(stage), parity)
        o = warpgroup_mma(shared.probs(stage), values, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(shared.right_empty.index(stage))
    mbarrier.wait(shared.norm_full.index(0), tiles & 1)
    norm = shared.norm.load(gl.SliceLayout(1, layout))
    mbarrier.arrive(shared.norm_empty.index(0))
    return o * norm[:, None]


@gluon.jit
def store_half(out, tile, o, batches, heads, first: gl.constexpr):
    """Write columns from ``first`` on of the tile's rows, [64, C / 2] fp32, to [S_q, B, N, C]."""
    HALF: gl.constexpr = o.shape[1]
    layout: gl.constexpr = sector_layout(HALF)
    index, inside = tile.rows(batches, heads, gl.SliceLayout(1, layout))
    column = first + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    values = gl.convert_layout(o.to(out.dtype.element_ty), layout)
    gl.store(out + (index * (2 * HALF))[:, None] + column[None, :], values, mask=inside[:, None])


@gluon.jit(do_not_specialize=["total", "batches", "heads"])
def attend_forward(
    q_content,
    q_rope,
    latent,
    k_rope,
    tiles,
    out,
    lse,
    largest,
    total,
    batches,
    heads,
    scale,
    HEADS: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    RECORD: gl.constexpr,
):
    """Attention of every tile, entry of the batch and group of heads, by any number of programs.

    Args:
        q_content: Tensor map of [S_q, B, N, C] in boxes [64 / HEADS, 1, HEADS, C].
        q_rope: Of [S_q, B, N, R] in boxes [64 / HEADS, 1, HEADS, R].
        latent: Of [S_k, B, C] in boxes [64, 1, columns that arrive together].
        k_rope: Of [S_k, B, R] in boxes [64, 1, R].
        tiles: int32 [tiles, 5], see ``query_tiles`` in tiles.py.
        out: [S_q, B, N, C], contiguous.
        lse: [S_q, B, N] fp32, contiguous.
        largest: Likewise; not written without RECORD.
        total: Tiles, times entries of the batch, times groups of heads.
        batches: B.
        heads: N.
        scale: Of the scores, positive, times log2(e).
        HEADS: Heads in a tile.
        C: ``kv_lora_rank``.
        R: Width of k_rope.
        RECORD: Whether the largest score of every row is wanted.
    """
    # The largest scores take the registers that queries might have.
    shared = allocate(q_content, q_rope, latent, k_rope, C, R, 1 if RECORD else 2, True)
    work = ProgramTiles(tiles, total, batches, heads, HEADS)
    gl.warp_specialize(
        [
            (_score_role, (work, shared, out, lse, largest, scale, RECORD)),
            (_value_role, (work, shared, out)),
            (_load_role, (work, shared, q_content, q_rope, latent, k_rope)),
        ],
        [4, 1],  # warps of the roles but the first, which has the launch's four
        [VALUE_REGISTERS, LOAD_REGISTERS],
    )
