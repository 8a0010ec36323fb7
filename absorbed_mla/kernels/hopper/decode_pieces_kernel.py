"""The decode kernel of parity mode, where programs go through all keys of a tile, piece by piece.

Roles, shared memory, barriers and arithmetic are those of decode_kernel.py, with a piece of a
tile's keys (pieces.py) in place of a part of them: its output is added to those of the pieces
before, which wait in memory of the program's own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.hopper.forward_kernel import (
    LN_2,
    LOAD_REGISTERS,
    VALUE_REGISTERS,
    compute_right,
    finish_left,
    start_left,
)
from absorbed_mla.kernels.hopper.forward_scores import count_blocks
from absorbed_mla.kernels.hopper.forward_shared import allocate, load_queries
from absorbed_mla.kernels.hopper.layouts import accumulator_layout
from absorbed_mla.kernels.hopper.paged_keys import PagedKeys
from absorbed_mla.kernels.hopper.pieces import WholeTiles, running_sum
from absorbed_mla.kernels.hopper.tile import KEYS


@gluon.jit
def _load_role(work, shared, queries, keys):
    """Load the queries of each piece, then its blocks, as soon as there is room."""
    turn, blocks = gl.to_tensor(0), gl.to_tensor(0)
    for index in range(work.count()):
        for number in range(work.pieces(index)):
            tile = work.piece(index, number)
            load_queries(tile, 0, shared, queries[0], queries[1], turn)
            keys.load(tile, shared, blocks)
            blocks += count_blocks(tile)
            turn += 1


@gluon.jit
def _score_role(work, shared, sums, out, lse, heads, scale):
    """Compute each piece's scores and LSE, and the left half of each tile's output."""
    rows: gl.constexpr = gl.SliceLayout(1, accumulator_layout(KEYS, 1))
    turn, blocks = gl.to_tensor(0), gl.to_tensor(0)
    for index in range(work.count()):
        for number in range(work.pieces(index)):
            tile = work.piece(index, number)
            o, top, total, norm, _ = start_left(tile, shared, scale, turn, blocks)
            blocks += count_blocks(tile)
            bits = gl.where(total > 0, top * scale + gl.log2(total), -float("inf"))
            factors, bits = sums.weigh(bits, number, turn, rows)
            tile = work.piece(index, number)
            row, inside = tile.rows(1, heads, rows)
            gl.store(lse + row, bits * LN_2, mask=inside)
            o = finish_left(shared, o, norm, blocks)
            sums.add(tile, o, factors, out, heads, number, work.pieces(index), 0)
            turn += 1


@gluon.jit
def _value_role(work, shared, sums, out, heads):
    """Compute the right half of each tile's output."""
    HALF: gl.constexpr = shared.C // 2
    rows: gl.constexpr = gl.SliceLayout(1, accumulator_layout(HALF, 1))
    turn, blocks = gl.to_tensor(0), gl.to_tensor(0)
    for index in range(work.count()):
        for number in range(work.pieces(index)):
            tile = work.piece(index, number)
            o = compute_right(tile, shared, turn, blocks)
            blocks += count_blocks(tile)
            tile = work.piece(index, number)
            factors = sums.read(turn, rows)
            sums.add(tile, o, factors, out, heads, number, work.pieces(index), HALF)
            turn += 1


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
        q_content: As there, like all that is not below.
        q_rope: As there.
        latent: As there.
        k_rope: As there.
        tiles: As there.
        starts: As there, of parts that are one tile each.
        block_table: As there.
        out: As there.
        lse: As there.
        sum_out: fp32 [programs, 64, C], contiguous.
        num_parts: Of ``starts``.
        block_size: As there.
        table_stride: As there.
        heads: As there.
        head_blocks: As there.
        scale: As there.
        HEADS: As there.
        C: As there.
        R: As there.
    """
    # Parts behind the last tile begin there.
    total = gl.load(starts + 2 * num_parts) * head_blocks
    work = WholeTiles(tiles, total, head_blocks, HEADS)
    if gl.program_id(0) < total:
        shared = allocate(q_content, q_rope, latent, k_rope, C, R, 1)
        sums = running_sum(sum_out)
        keys = PagedKeys(latent, k_rope, block_table, block_size, table_stride)
        queries = q_content, q_rope
        gl.warp_specialize(
            [
                (_score_role, (work, shared, sums, out, lse, heads, scale)),
                (_value_role, (work, shared, sums, out, heads)),
                (_load_role, (work, shared, queries, keys)),
            ],
            [4, 1],  # warps of the roles but the first, which has the launch's four
            [VALUE_REGISTERS, LOAD_REGISTERS],
        )
