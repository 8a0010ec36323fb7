"""The decode kernel: the forward kernel over a paged cache, with split-KV.

Roles, shared memory, barriers and arithmetic are those of forward_kernel.py: a tile of 64 rows
(heads of one or more new tokens of a request) goes through keys 64 at a time. Different are

* where keys are: in blocks of the cache, where paged_keys.py finds them, or fp8_rows.py if they are
  rows in FP8.
* who does what: of a program's tiles the first and the last may lie in parts of other programs,
  too; paged/schedule.py makes the parts equal.
* what is written: the output where a tile is in one part, else its output in fp32 with its LSE to
  base 2, which paged/combine.py combines.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.hopper.decode_tile import Part
from absorbed_mla.kernels.hopper.forward_kernel import (
    LN_2,
    LOAD_REGISTERS,
    VALUE_REGISTERS,
    compute_right,
    finish_left,
    start_left,
    store_half,
)
from absorbed_mla.kernels.hopper.forward_scores import count_blocks
from absorbed_mla.kernels.hopper.forward_shared import allocate, load_queries
from absorbed_mla.kernels.hopper.layouts import accumulator_layout
from absorbed_mla.kernels.hopper.paged_keys import PagedKeys
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS


@gluon.jit
def load_role(part, shared, queries, keys):
    """Load each tile's queries, then its blocks, as soon as there is room."""
    begin, end = part.range()
    blocks = gl.to_tensor(0)
    for index in range(begin, end):
        tile = part.tile(index)
        load_queries(tile, 0, shared, queries[0], queries[1], index - begin)
        keys.load(tile, shared, blocks)
        blocks += count_blocks(tile)


@gluon.jit
def score_role(part, shared, whole, split, heads, scale, SPLIT: gl.constexpr):
    """Compute each tile's scores, its LSE and the left half of its output."""
    layout: gl.constexpr = accumulator_layout(KEYS, 1)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    begin, end = part.range()
    blocks = gl.to_tensor(0)
    for index in range(begin, end):
        tile = part.tile(index)
        o, top, total, norm, _ = start_left(tile, shared, scale, index - begin, blocks)
        blocks += count_blocks(tile)
        tile = part.tile(index)
        bits = gl.where(total > 0, top * scale + gl.log2(total), -float("inf"))
        row, inside = tile.rows(1, heads, rows)
        if SPLIT:
            gl.store(split[1] + tile.place_rows(rows), bits, mask=inside & (tile.place >= 0))
            inside &= tile.place < 0
        gl.store(tile.results(whole[1], heads) + row, bits * LN_2, mask=inside)
        o = finish_left(shared, o, norm, blocks)
        _store(tile, o, whole[0], split[0], heads, 0, SPLIT)


@gluon.jit
def value_role(part, shared, whole, split, heads, SPLIT: gl.constexpr):
    """Compute the right half of each tile's output."""
    begin, end = part.range()
    blocks = gl.to_tensor(0)
    for index in range(begin, end):
        tile = part.tile(index)
        o = compute_right(tile, shared, index - begin, blocks)
        blocks += count_blocks(tile)
        _store(tile, o, whole[0], split[0], heads, shared.C // 2, SPLIT)


@gluon.jit
def _store(tile, o, out, split, heads, first: gl.constexpr, SPLIT: gl.constexpr):
    """Write columns from ``first`` on of the tile's rows, [64, C / 2], where they belong."""
    out = tile.results(out, heads * (2 * o.shape[1]))
    if SPLIT:
        if tile.place < 0:
            store_half(out, tile, o, 1, heads, first)
        else:
            _store_split(split, tile, o, heads, first)
    else:
        store_half(out, tile, o, 1, heads, first)


@gluon.jit
def _store_split(split, tile, o, heads, first: gl.constexpr):
    """Write columns from ``first`` on of the tile's rows, [64, C / 2], to its place in fp32."""
    HALF: gl.constexpr = o.shape[1]
    layout: gl.constexpr = accumulator_layout(HALF, 1)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    place = tile.place_rows(rows)
    _, inside = tile.rows(1, heads, rows)
    column = first + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    # The four lanes of a row write 32 bytes together, a whole sector, without any exchange.
    pointers = split + (place * (2 * HALF))[:, None] + column[None, :]
    gl.store(pointers, o, mask=inside[:, None])


@gluon.jit(
    do_not_specialize=["block_size", "table_stride", "heads", "head_blocks"],
    do_not_specialize_on_alignment=["block_table"],
)
def attend_decode(
    q_content,
    q_rope,
    latent,
    k_rope,
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
):
    """Attention of every tile; one program for each part of the work and group of heads.

    Args:
        q_content: Tensor map of [T, 1, N, C] in boxes [64 / HEADS, 1, HEADS, C]; where no request
            has more than one new token, [1, 64 / HEADS, HEADS, C], whose other rows are zeros.
        q_rope: Of [T, 1, N, R], likewise.
        latent: Of [block_size, blocks, C] in boxes [keys that lie together, 1, columns that arrive
            together].
        k_rope: Of [block_size, blocks, R] in boxes [keys that lie together, 1, R].
        tiles: int32 [tiles, 8], contiguous, see paged/schedule.py.
        starts: int32 [parts + 1, 2], contiguous, likewise.
        block_table: [Q, blocks of a request], int32 or int64, last axis contiguous.
        out: [T, N, C], contiguous, twice so long where there are prefixes (merge_rows.py); tiles in
            several parts are not written.
        lse: [T, N] fp32, contiguous, likewise.
        split_out: [places, head_blocks, 64, C] fp32, contiguous; what is
            written of these.
        split_lse: [places, head_blocks, 64] fp32, contiguous, to base 2.
        block_size: Keys in a block of the cache.
        table_stride: Of ``block_table``.
        heads: N.
        head_blocks: Tiles for all heads of a token.
        scale: Of the scores, positive, times log2(e).
        HEADS: Heads in a tile.
        C: ``kv_lora_rank``.
        R: Width of k_rope.
        SPLIT: Whether a tile may be in several parts.
    """
    part = Part(tiles, starts, head_blocks, HEADS, ROWS)
    begin, end = part.range()
    if begin < end:
        shared = allocate(q_content, q_rope, latent, k_rope, C, R, 1)
        keys = PagedKeys(latent, k_rope, block_table, block_size, table_stride)
        queries = q_content, q_rope
        whole, waiting = (out, lse), (split_out, split_lse)
        gl.warp_specialize(
            [
                (score_role, (part, shared, whole, waiting, heads, scale, SPLIT)),
                (value_role, (part, shared, whole, waiting, heads, SPLIT)),
                (load_role, (part, shared, queries, keys)),
            ],
            [4, 1],  # warps of the roles but the first, which has the launch's four
            [VALUE_REGISTERS, LOAD_REGISTERS],
        )
