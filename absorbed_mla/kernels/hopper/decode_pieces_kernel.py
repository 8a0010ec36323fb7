"""Parity mode's decode kernel: fixed-size KV splits of a tile, combined one by one in order.

Roles, shared memory, barriers and arithmetic are those of decode_kernel.py, but for the end of a
piece (pieces.py): there outputs, denominators and references begin anew, and the output is added to
the sum of the pieces before, while the tensor cores compute scores of the next piece. ``norm_full``
and ``norm_empty`` are of the factors that ``RunningSum`` has, per piece.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from absorbed_mla.kernels.hopper.forward_kernel import (
    LN_2,
    LOAD_REGISTERS,
    VALUE_REGISTERS,
    add_left,
    next_left,
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
from absorbed_mla.kernels.hopper.forward_shared import STAGES, allocate, clear_rows, load_queries
from absorbed_mla.kernels.hopper.layouts import accumulator_layout
from absorbed_mla.kernels.hopper.paged_keys import PagedKeys
from absorbed_mla.kernels.hopper.pieces import BLOCKS, WholeTiles, running_sum
from absorbed_mla.kernels.hopper.ring import ring_position, wait_full
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS


@gluon.jit
def load_role(work, shared, queries, keys):
    """Load each tile's queries, then its blocks, as soon as there is room."""
    blocks = gl.to_tensor(0)
    for index in range(work.count()):
        tile = work.tile(index)
        load_queries(tile, 0, shared, queries[0], queries[1], index)
        keys.load(tile, shared, blocks)
        blocks += count_blocks(tile)


@gluon.jit
def score_role(work, shared, sums, out, lse, heads, scale):
    """Compute each tile's scores, its LSE and the left half of its output."""
    rows: gl.constexpr = gl.SliceLayout(1, accumulator_layout(KEYS, 1))
    turn, blocks = gl.to_tensor(0), gl.to_tensor(0)
    for index in range(work.count()):
        tile = work.tile(index)
        count = count_blocks(tile)
        pieces = (count + BLOCKS - 1) // BLOCKS
        o, top, total = _left(tile, shared, sums, out, heads, scale, index, turn, blocks)
        # Not pieces - 1: Triton 3.6 cannot compile what is known to be the last one.
        number = (count - 1) // BLOCKS
        factors, bits = sums.weigh(top, total, scale, number, turn + number)
        row, inside = tile.rows(1, heads, rows)
        gl.store(lse + row, bits * LN_2, mask=inside)
        o = warpgroup_mma_wait(0, deps=[o])
        blocks += count
        mbarrier.arrive(shared.left_empty.index((blocks - 1) % STAGES))
        sums.add(tile, o, factors, out, heads, number, pieces, 0)
        turn += pieces


@gluon.jit
def _left(tile, shared, sums, out, heads, scale, tiles, turn, blocks):
    """Queue all products of scores and of the left half, and add all pieces but the last.

    Args:
        tile: The tile.
        shared: What ``allocate`` gave.
        sums: The ``RunningSum``.
        out: [T, N, C], contiguous.
        heads: N.
        scale: Of the scores, times log2(e).
        tiles: How many the program has done before.
        turn: Pieces of these tiles.
        blocks: Likewise.

    Returns:
        Of the last piece the half [64, C / 2] whose last product is running, references and
        denominators, each [64].
    """
    HALF: gl.constexpr = shared.C // 2
    layout: gl.constexpr = accumulator_layout(KEYS, 1)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    top = tile.first_top(rows)
    total = gl.zeros([ROWS], gl.float32, rows)
    o = gl.zeros([ROWS, HALF], gl.float32, accumulator_layout(HALF, 1))
    count = count_blocks(tile)
    last = count - 1
    mbarrier.wait(shared.q_full.index(0), tiles & 1)
    q_rope = rope_queries(shared, layout)
    stage, parity = ring_position(blocks, STAGES)
    s = start_scores(shared, stage, parity, layout)
    s = finish_scores(shared, s, q_rope, stage, parity)
    s = warpgroup_mma_wait(0, deps=[s])
    for number in range((last + BLOCKS) // BLOCKS):
        end = gl.minimum((number + 1) * BLOCKS, count) - 1
        for block in range(number * BLOCKS, end):
            s, o, top, total, _most = next_left(
                tile, shared, s, o, top, total, top, q_rope, scale, blocks, block
            )
            s = warpgroup_mma_wait(0, deps=[s])
        if end < last:
            s, o, top, total, _most = next_left(
                tile, shared, s, o, top, total, top, q_rope, scale, blocks, end
            )
            # While scores of the next piece are computed.
            factors, _bits = sums.weigh(top, total, scale, number, turn + number)
            sums.add(tile, o, factors, out, heads, number, number + 2, 0)
            top = tile.first_top(rows)
            total = gl.zeros([ROWS], gl.float32, rows)
            o = gl.zeros([ROWS, HALF], gl.float32, accumulator_layout(HALF, 1))
            s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(shared.q_empty.index(0))
    stage = (blocks + last) % STAGES
    values = shared.left.index(stage).reshape([KEYS, HALF])
    # No product that is still running reads them: none was queued behind the last block's scores.
    clear_rows(values, tile.keys - last * KEYS)
    s = hide(s, tile, last, layout)
    top, total, factor, probs = softmax(shared, s, top, total, stage, scale)
    return add_left(shared, o, factor, probs, stage), top, total


@gluon.jit
def value_role(work, shared, sums, out, heads):
    """Compute the right half of each tile's output."""
    HALF: gl.constexpr = shared.C // 2
    layout: gl.constexpr = accumulator_layout(HALF, 1)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    turn, blocks = gl.to_tensor(0), gl.to_tensor(0)
    for index in range(work.count()):
        tile = work.tile(index)
        count = count_blocks(tile)
        pieces = (count + BLOCKS - 1) // BLOCKS
        for number in range(pieces):
            o = gl.zeros([ROWS, HALF], gl.float32, layout)
            for block in range(number * BLOCKS, gl.minimum((number + 1) * BLOCKS, count)):
                stage = (blocks + block) % STAGES
                values = shared.right.index(stage).reshape([KEYS, HALF])
                wait_full(shared.p_full, blocks + block, STAGES)
                if block == count - 1:
                    clear_rows(values, tile.keys - block * KEYS)
                if some_change(shared, stage):
                    o = o * shared.factor.index(stage).load(rows)[:, None]
                o = warpgroup_mma(shared.probs(stage), values, o, is_async=True)
                o = warpgroup_mma_wait(0, deps=[o])
                mbarrier.arrive(shared.right_empty.index(stage))
            factors = sums.read(turn + number, rows)
            sums.add(tile, o, factors, out, heads, number, pieces, HALF)
        blocks += count
        turn += pieces


@gluon.jit(
    do_not_specialize=["num_parts", "block_size", "table_stride", "heads", "head_blocks"],
    do_not_specialize_on_alignment=["block_table"],
)
def attend_decode_pieces(
    q_content,
    q_rope,
    latent,
    k_rope,
    tiles,
    starts,
    block_table,
    out,
    lse,
    sum_out,
    num_parts,
    block_size,
    table_stride,
    heads,
    head_blocks,
    scale,
    HEADS: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
):
    """Attention of every tile, by any number of programs; what is not here as in ``attend_decode``.

    Args:
        starts: Of parts that are one tile each, otherwise as there.
        sum_out: fp32 [programs, 64, C], contiguous.
        num_parts: Of ``starts``.
    """
    # Parts behind the last tile begin there.
    total = gl.load(starts + 2 * num_parts) * head_blocks
    work = WholeTiles(tiles, total, head_blocks, HEADS)
    if gl.program_id(0) < total:
        shared = allocate(q_content, q_rope, latent, k_rope, C, R, 1)
        sums = running_sum(sum_out, shared)
        keys = PagedKeys(latent, k_rope, block_table, block_size, table_stride)
        queries = q_content, q_rope
        gl.warp_specialize(
            [
                (score_role, (work, shared, sums, out, lse, heads, scale)),
                (value_role, (work, shared, sums, out, heads)),
                (load_role, (work, shared, queries, keys)),
            ],
            [4, 1],  # warps of the roles but the first, which has the launch's four
            [VALUE_REGISTERS, LOAD_REGISTERS],
        )
