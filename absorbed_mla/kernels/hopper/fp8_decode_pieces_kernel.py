"""The decode kernel of parity mode over rows in FP8, where programs go through all keys of a tile.

It is that of decode_pieces_kernel.py, but for the keys, which fp8_rows.py decodes on their way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.hopper.decode_pieces_kernel import load_role, score_role, value_role
from absorbed_mla.kernels.hopper.fp8_rows import (
    LOAD_REGISTERS,
    LOAD_WARPS,
    VALUE_REGISTERS,
    Fp8Rows,
    allocate_rows,
)
from absorbed_mla.kernels.hopper.pieces import WholeTiles, running_sum

# Columns of the output that are added up at a time: the warps that decode have registers that in
# decode_pieces_kernel.py the value role has for more.
_COLUMNS = gl.constexpr(32)


@gluon.jit(
    do_not_specialize=[
        "block_units",
        "row_units",
        "together",
        "num_parts",
        "table_stride",
        "heads",
        "head_blocks",
    ],
    do_not_specialize_on_alignment=["block_table"],
)
def attend_fp8_decode_pieces(
    q_content,
    q_rope,
    words,
    block_units,
    row_units,
    together,
    tiles,
    starts,
    block_table,
    out,
    lse,
    sum_out,
    num_parts,
    BLOCK_SIZE: gl.constexpr,
    table_stride,
    heads,
    head_blocks,
    scale,
    HEADS: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
):
    """As ``attend_decode_pieces``, over rows as ``attend_fp8_decode`` takes them."""
    # Parts behind the last tile begin there.
    total = gl.load(starts + 2 * num_parts) * head_blocks
    work = WholeTiles(tiles, total, head_blocks, HEADS)
    if gl.program_id(0) < total:
        shared = allocate_rows(q_content, q_rope, C, R)
        sums = running_sum(sum_out, shared, _COLUMNS)
        units = block_units, row_units, together
        keys = Fp8Rows(words, *units, block_table, table_stride, BLOCK_SIZE)
        queries = q_content, q_rope
        gl.warp_specialize(
            [
                (score_role, (work, shared, sums, out, lse, heads, scale)),
                (value_role, (work, shared, sums, out, heads)),
                (load_role, (work, shared, queries, keys)),
            ],
            [4, LOAD_WARPS],  # warps of the roles but the first, which has the launch's four
            [VALUE_REGISTERS, LOAD_REGISTERS],
        )
