"""The multi-head (MHA) forward kernel, K and V per head: tiles of 128 queries, keys 128 at a time.

A program does one work after another, each one tile of queries of one head (``TileScheduler``).
The warps have three roles:

* ``_load_role``, one warp: copies queries, keys and values to shared memory by tensor maps (TMA),
  also those of the next work while this one is being finished, and draws works.
* ``_attend_role``, twice four warps: scores S = Q K^T, online softmax (multi_head_softmax.py) and
  O = O * factor + P V of 64 of the queries. S, P and O stay in registers.

What an attend role does for blocks 0, 1, ..; products queued together run one after the other:

    products    S 0 |           | S 1          | PV 0      | S 2          | PV 1      | ..
    the warps       | softmax 0 | O * factor 0 | softmax 1 | O * factor 1 | softmax 2 | ..

So O is rescaled while the next scores are computed and a softmax computed while the product before
it runs; before they queue, the warps have waited for the keys during the softmax. While a role has
nothing queued the other's products run: the two come apart by themselves, without barriers between
them.

Barriers. ``.._full`` is passed when data has come, ``.._empty`` when it is no longer needed:

* ``q_full`` (per work and half): its queries are there, and so is the number of the next work.
* ``q_empty`` (likewise): all scores of the half have been computed.
* ``k_full``, ``v_full`` (per block): its keys, and its values, are there.
* ``k_empty``, ``v_empty`` (per block): both attend roles are done with them.
* ``landed`` (per last block that keys do not fill): its values have come; they are announced by
  ``v_full`` when those past the keys have been cleared.

A wait names the parity of the phase that it waits for: the program's block i is phase i // 2 of its
stage. The phase before the first, which is named for what was not used yet, counts as passed.
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

from absorbed_mla.kernels.hopper.forward_shared import announce
from absorbed_mla.kernels.hopper.layouts import (
    SWIZZLED,
    accumulator_layout,
    row_layout,
    sector_layout,
)
from absorbed_mla.kernels.hopper.multi_head_shared import STAGES, allocate
from absorbed_mla.kernels.hopper.multi_head_softmax import (
    add_sink,
    add_sums,
    lazy_softmax,
    partial_sums,
    rescale,
    row_sums,
)
from absorbed_mla.kernels.hopper.multi_head_tile import BLOCK, ROWS, TileScheduler
from absorbed_mla.kernels.hopper.ring import wait_empty
from absorbed_mla.kernels.hopper.synchronize import synchronize

LN_2 = gl.constexpr(math.log(2))
# Registers of each thread of the roles but the first. At launch three warpgroups (the load role's
# warp counts as one) have 168 each; the first gets what the others leave of these 504: 232.
ATTEND_REGISTERS = gl.constexpr(232)
LOAD_REGISTERS = gl.constexpr(40)
# Rows that the load role's warp clears at once.
_CLEARED = gl.constexpr(16)


@gluon.jit
def _load_role(works, shared, q_content, q_rope, k_content, k_rope, value):
    """Load what every work needs: keys a block ahead of values, each when its stage is free."""
    number, blocks, cleared = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    work, upcoming = gl.program_id(0), works.second()
    while work < works.total:
        tile = works.tile(work)
        last = tile.count_blocks() - 1
        _load_keys(tile, shared, k_content, k_rope, 0, blocks)
        # Both roles have read what was there: they were done with the queries of that work.
        shared.tell(number, upcoming)
        synchronize()
        _load_queries(tile, shared, q_content, q_rope, 0, number)
        _load_queries(tile, shared, q_content, q_rope, 1, number)
        for block in range(last):
            _load_keys(tile, shared, k_content, k_rope, block + 1, blocks)
            full = shared.value_ring.full.index((blocks + block) % STAGES)
            _load_values(tile, shared, value, block, blocks, full)
        full = shared.value_ring.full.index((blocks + last) % STAGES)
        left = tile.keys - last * BLOCK
        if left < BLOCK:
            landed = shared.landed.index(0)
            _load_values(tile, shared, value, last, blocks, landed)
            mbarrier.wait(landed, cleared & 1)
            cleared += 1
            _clear(shared.value.index((blocks + last) % STAGES), left)
            announce(full)
        else:
            _load_values(tile, shared, value, last, blocks, full)
        number += 1
        blocks += last + 1
        work = upcoming
        upcoming = works.draw()


@gluon.jit
def _load_queries(tile, shared, q_content, q_rope, HALF: gl.constexpr, number):
    """Load half of the queries when the scores of the work before are computed."""
    mbarrier.wait(shared.q_empty.index(HALF), (number & 1) ^ 1)
    full = shared.q_full.index(HALF)
    mbarrier.expect(full, q_content.block_type.nbytes + q_rope.block_type.nbytes)
    query = tile.query_start + HALF * ROWS
    position = [query, tile.batch, tile.head, 0]
    tma.async_copy_global_to_shared(q_content, position, full, shared.q_content.index(HALF))
    position = [query, tile.batch, tile.head, shared.CONTENT]
    tma.async_copy_global_to_shared(q_rope, position, full, shared.q_rope.index(HALF))


@gluon.jit
def _load_keys(tile, shared, k_content, k_rope, block, blocks):
    """Load the keys of a block when both roles are done with those of the block before last."""
    full = shared.key_ring.acquire(
        blocks + block, k_content.block_type.nbytes + k_rope.block_type.nbytes
    )
    stage, _ = shared.key_ring.position(blocks + block)
    key = tile.key_start + block * BLOCK
    position = [key, tile.batch, tile.head, 0]
    tma.async_copy_global_to_shared(k_content, position, full, shared.k_content.index(stage))
    position = [key, tile.batch, tile.head, shared.CONTENT]
    tma.async_copy_global_to_shared(k_rope, position, full, shared.k_rope.index(stage))


@gluon.jit
def _load_values(tile, shared, value, block, blocks, full):
    """Load the values of a block, likewise; ``full`` is passed when they have come."""
    stage, _ = shared.value_ring.position(blocks + block)
    wait_empty(shared.value_ring.empty, blocks + block, STAGES)
    mbarrier.expect(full, value.block_type.nbytes)
    position = [tile.key_start + block * BLOCK, tile.batch, tile.head, 0]
    tma.async_copy_global_to_shared(value, position, full, shared.value.index(stage))


@gluon.jit
def _clear(values, count):
    """Zero all but the first ``count`` values of a block: P is 0 there, but 0 * NaN is not."""
    V: gl.constexpr = values.shape[3]
    rows = values.reshape([BLOCK, V])
    layout: gl.constexpr = row_layout(SWIZZLED, gl.num_warps())
    inside = gl.arange(0, _CLEARED, gl.SliceLayout(1, layout))[:, None]
    for first in gl.static_range(0, BLOCK, _CLEARED):
        if count < first + _CLEARED:
            for column in gl.static_range(0, V, SWIZZLED):
                part = rows.slice(first, _CLEARED, dim=0).slice(column, SWIZZLED, dim=1)
                kept = gl.where(first + inside < count, part.load(layout), 0.0)
                part.store(kept.to(values.dtype))


@gluon.jit
def _attend_role(
    works, shared, out, lse, largest, sink, scale, window, HALF: gl.constexpr, RECORD: gl.constexpr
):
    """Attention of half of the queries of every work."""
    number, blocks = gl.to_tensor(0), gl.to_tensor(0)
    work = gl.program_id(0)
    tile = works.tile(work)
    while work < works.total:
        mbarrier.wait(shared.q_full.index(HALF), number & 1)
        upcoming = shared.told(number)
        # What the next work is arrives while this one is done.
        next_tile = works.tile(upcoming)
        _attend(works, tile, shared, blocks, out, lse, largest, sink, scale, window, HALF, RECORD)
        number += 1
        blocks += tile.count_blocks()
        work, tile = upcoming, next_tile


@gluon.jit
def _attend(
    works,
    tile,
    shared,
    blocks,
    out,
    lse,
    largest,
    sink,
    scale,
    window,
    HALF: gl.constexpr,
    RECORD: gl.constexpr,
):
    """Attention of half of the queries of a work, before which the program did so many blocks."""
    V: gl.constexpr = shared.V
    layout: gl.constexpr = accumulator_layout(BLOCK, 1)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    o_layout: gl.constexpr = accumulator_layout(V, 1)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    top = gl.full([ROWS], -float("inf"), gl.float32, rows)
    o = gl.zeros([ROWS, V], gl.float32, o_layout)
    open_blocks = tile.open_blocks(HALF)
    last = tile.count_blocks() - 1
    shared.key_ring.wait(blocks)
    s = _start_scores(shared, blocks, HALF, layout)
    s = warpgroup_mma_wait(0, deps=[s])
    shared.key_ring.release(blocks)
    # A tile's 128 queries see all but the oldest keys, which are in its first block.
    if window is not None:
        s = tile.hide(s, 0, HALF, layout, window)
    elif open_blocks == 0:
        s = tile.hide(s, 0, HALF, layout, None)
    true_top = top
    top, true_top, factor, p = lazy_softmax(s, top, true_top, scale, RECORD)
    total = partial_sums(p)
    p = gl.convert_layout(p.to(shared.DTYPE), p_layout)
    shared.value_ring.wait(blocks)
    if last > 0:
        shared.key_ring.wait(blocks + 1)
    for block in range(1, last + 1):
        stage, before = (blocks + block) % STAGES, (blocks + block - 1) % STAGES
        s = _start_scores(shared, blocks + block, HALF, layout)
        o = rescale(o, factor, o_layout)
        o = warpgroup_mma(p, shared.values(before), o, is_async=True)
        # One product, the one with values, may be unfinished: the scores' before it are not.
        s = warpgroup_mma_wait(1, deps=[s])
        shared.key_ring.release(blocks + block)
        if block >= open_blocks:
            s = tile.hide(s, block, HALF, layout, None)
        top, true_top, factor, p = lazy_softmax(s, top, true_top, scale, RECORD)
        total = add_sums(total, factor, partial_sums(p))
        # Here, and the next wait with the sums, or the compiler would compute the softmax after it.
        shared.value_ring.wait(blocks + block)
        if block < last:
            shared.key_ring.wait(blocks + block + 1)
        o, total = warpgroup_mma_wait(0, deps=[o, total])
        shared.value_ring.release(blocks + block - 1)
        p = gl.convert_layout(p.to(shared.DTYPE), p_layout)
    mbarrier.arrive(shared.q_empty.index(HALF))
    stage = (blocks + last) % STAGES
    o = rescale(o, factor, o_layout)
    o = warpgroup_mma(p, shared.values(stage), o, is_async=True)
    total = row_sums(total, rows)
    index, inside = tile.rows(HALF, works, rows)
    reference = top * scale
    if sink is not None:
        logit = gl.load(sink + tile.head).to(gl.float32) / LN_2
        total, reference, kept = add_sink(total, reference, logit)
    least = gl.where(total > 0, (reference + gl.log2(total)) * LN_2, -float("inf"))
    gl.store(lse + index, least, mask=inside)
    if RECORD:
        gl.store(largest + index, true_top * (scale * LN_2), mask=inside)
    norm = gl.where(total > 0, 1 / total, 0.0)
    if sink is not None:
        norm = norm * kept
    o = warpgroup_mma_wait(0, deps=[o])
    shared.value_ring.release(blocks + last)
    o = o * gl.convert_layout(norm, o_rows)[:, None]
    _store(out, works, tile, o, HALF)


@gluon.jit
def _start_scores(shared, index, HALF: gl.constexpr, layout: gl.constexpr):
    """Queue S = Q K^T with a block whose keys have come, [64, 128] fp32."""
    stage, _ = shared.key_ring.position(index)
    s = gl.zeros([ROWS, BLOCK], gl.float32, layout)
    queries, keys = shared.contents(HALF, stage)
    s = warpgroup_mma(queries, keys.permute((1, 0)), s, use_acc=False, is_async=True)
    queries, keys = shared.ropes(HALF, stage)
    return warpgroup_mma(queries, keys.permute((1, 0)), s, is_async=True)


@gluon.jit
def _store(out, works, tile, o, HALF: gl.constexpr):
    """Write the rows [64, V] fp32 to [S_q, B, N, V]."""
    V: gl.constexpr = o.shape[1]
    layout: gl.constexpr = sector_layout(V)
    index, inside = tile.rows(HALF, works, gl.SliceLayout(1, layout))
    column = gl.arange(0, V, gl.SliceLayout(0, layout))
    values = gl.convert_layout(o.to(out.dtype.element_ty), layout)
    gl.store(
        out + (index.to(gl.int64) * V)[:, None] + column[None, :], values, mask=inside[:, None]
    )


@gluon.jit(do_not_specialize=["total", "section", "section_works", "groups", "heads", "window"])
def attend_multi_head(
    q_content,
    q_rope,
    k_content,
    k_rope,
    value,
    tiles,
    drawn,
    out,
    lse,
    largest,
    sink,
    total,
    section,
    section_works,
    groups,
    heads,
    scale,
    window,
    RECORD: gl.constexpr,
):
    """Attention of every tile of queries, by any number of programs.

    Args:
        q_content: Tensor map of queries [S_q, B, N, D + R] in boxes [64, 1, 1, D].
        q_rope: Of the same queries in boxes [64, 1, 1, R].
        k_content: Of keys [S_k, B, N, D + R] in boxes [128, 1, 1, D].
        k_rope: Of the same keys in boxes [128, 1, 1, R].
        value: Of [S_k, B, N, V] in boxes [128, 1, 1, V].
        tiles: int32 [tiles, 5], see ``query_tiles`` in tiles.py.
        drawn: int32 [1], 0.
        out: [S_q, B, N, V], contiguous.
        lse: [S_q, B, N] fp32, contiguous.
        largest: Likewise; not written without RECORD.
        sink: [N], a logit of each head that takes part in its softmax; or None.
        total: See ``TileScheduler``, like the next four.
        scale: Of the scores, positive, times log2(e).
        window: Keys that a query sees, for which the tiles were made; None for all up to its own.
        RECORD: Whether the largest score of every row is wanted.
    """
    works = TileScheduler(tiles, drawn, total, section, section_works, groups, heads)
    shared = allocate(q_content, q_rope, k_content, k_rope, value)
    gl.warp_specialize(
        [
            (_attend_role, (works, shared, out, lse, largest, sink, scale, window, 0, RECORD)),
            (_attend_role, (works, shared, out, lse, largest, sink, scale, window, 1, RECORD)),
            (_load_role, (works, shared, q_content, q_rope, k_content, k_rope, value)),
        ],
        [4, 1],  # warps of the roles but the first, which has the launch's four
        [ATTEND_REGISTERS, LOAD_REGISTERS],
    )
