"""Backward kernel that writes P and dS of some tiles to global memory, for GEMMs after it.

A tile of 64 rows (tokens x heads) meets its keys, 128 at a time, as in backward_kernel.py, of which
this is step 1: S = Q K^T and dP = dO V^T, P = exp(S - LSE) and dS = P (dP - delta). They leave in
16 bits, 32 KiB per block, by the copy engine (TMA). Everything else is plain products over all rows
(stored_backward.py).

A program runs on each multiprocessor and computes tiles one after the other. Its warps have three
roles:

* ``_load_role``, one warp: copies a tile's queries and dO, and then its keys, all in chunks of 64
  columns, into a ring in shared memory, also those of the next tile while the others finish one.
* ``_probs_role``, four warps: S and P. The tile's queries are in its registers.
* ``_grad_role``, four warps: dP and dS. dO is in its registers.

So the products read nothing but keys from shared memory. dP of a block waits until two thirds of
its S are done, so that it runs while P is made, for which the tensor cores would idle:

    probs role   S 0 | P 0  | S 1        | P 1  | S 2        | ..
    grad role        | dP 0       | dS 0 | dP 1       | dS 1 | ..

dS is made of the P that is stored, in 16 bits.

Barriers. ``.._full`` is passed when data has come, ``.._empty`` when it is no longer needed:

* ``full``, ``empty`` (per chunk): both roles wait for and release every chunk, also the grad role
  k_rope, which it does not read.
* ``grad_go`` (per block): dP may begin.
* ``probs_full``, ``probs_empty`` (per block): P is in shared memory; dS is made.

Chunks and blocks are counted on from tile to tile; number i of a ring of n is phase i // n of its
stage i % n.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from absorbed_mla.kernels.hopper.backward_kernel import LOG2_E, read_statistics
from absorbed_mla.kernels.hopper.layouts import accumulator_layout
from absorbed_mla.kernels.hopper.ring import wait_empty, wait_full
from absorbed_mla.kernels.hopper.stored_backward_shared import (
    CHUNK,
    HANDED,
    KEYS,
    add_chunks,
    allocate,
    finish_product,
    load_keys,
    load_rows,
    take_rows,
)
from absorbed_mla.kernels.hopper.synchronize import synchronize
from absorbed_mla.kernels.hopper.tile import ROWS
from absorbed_mla.kernels.hopper.tile_scheduler import ProgramTiles

# Columns of P and of dS that are made at a time.
HALF = gl.constexpr(KEYS // 2)
# Registers of each thread of a role, see forward_kernel.py; the probs role gets 240, too.
GRAD_REGISTERS = gl.constexpr(240)
LOAD_REGISTERS = gl.constexpr(24)


@gluon.jit
def _load_role(work, shared, q_content, q_rope, grad_out, latent, k_rope):
    """Load each tile's rows, then its keys, as soon as there is room."""
    number = gl.to_tensor(0)
    for turn in range(work.count()):
        tile = work.tile(turn)
        load_rows(tile, shared, q_content, q_rope, grad_out, number)
        number += shared.CHUNKS + 1
        for block in range(_count_blocks(tile)):
            load_keys(tile, shared, latent, k_rope, block, number)
            number += shared.CHUNKS + 1


@gluon.jit
def _probs_role(work, shared, probs, lse, delta, first_token, stored_blocks, scale):
    """Compute and store P of each tile, and hand it over."""
    layout: gl.constexpr = accumulator_layout(KEYS, 1)
    dtype: gl.constexpr = shared.chunks.dtype
    WIDTHS: gl.constexpr = (CHUNK,) * shared.CHUNKS + (shared.R,)
    # Chunks of S that are queued when dP may begin, of which the last is still running.
    GO: gl.constexpr = len(WIDTHS) * 2 // 3 + 1
    number = gl.to_tensor(0)
    for turn in range(work.count()):
        tile = work.tile(turn)
        rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
        row_lse, _ = read_statistics(lse, delta, tile, work.batches, work.heads, rows_layout)
        rows = take_rows(shared, number, 0, WIDTHS, layout)
        number += shared.CHUNKS + 1
        for block in range(_count_blocks(tile)):
            handed = turn * stored_blocks + block
            _wait_for_room(shared, handed)
            s = gl.zeros([ROWS, KEYS], gl.float32, layout)
            s = add_chunks(shared, s, rows, number, WIDTHS, 0, GO)
            mbarrier.arrive(shared.grad_go.index(handed % HANDED))
            s = add_chunks(shared, s, rows, number, WIDTHS, GO, len(WIDTHS))
            s = finish_product(shared, s, number, WIDTHS)
            number += shared.CHUNKS + 1
            left, right = _halves(s)
            _wait_for_stores()
            _write_probs(shared, handed, left, 0, tile, block, row_lse, scale)
            _write_probs(shared, handed, right, HALF, tile, block, row_lse, scale)
            _hand_over(shared, handed, probs, tile, first_token, block)
        for block in range(_count_blocks(tile), stored_blocks):
            handed = turn * stored_blocks + block
            _wait_for_room(shared, handed)
            mbarrier.arrive(shared.grad_go.index(handed % HANDED))
            _wait_for_stores()
            shared.probs.index(handed % HANDED).store(gl.zeros([ROWS, KEYS], dtype, layout))
            _hand_over(shared, handed, probs, tile, first_token, block)
    tma.store_wait(0)


@gluon.jit
def _grad_role(work, shared, grad_scores, lse, delta, first_token, stored_blocks, scale):
    """Compute and store dS of each tile."""
    layout: gl.constexpr = accumulator_layout(KEYS, 1)
    dtype: gl.constexpr = shared.chunks.dtype
    WIDTHS: gl.constexpr = (CHUNK,) * shared.CHUNKS
    number = gl.to_tensor(0)
    for turn in range(work.count()):
        tile = work.tile(turn)
        rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
        _, row_delta = read_statistics(lse, delta, tile, work.batches, work.heads, rows_layout)
        rows = take_rows(shared, number, 1, WIDTHS, layout)
        _pass_rope(shared, number)
        number += shared.CHUNKS + 1
        for block in range(_count_blocks(tile)):
            handed = turn * stored_blocks + block
            _wait_to_go(shared, handed)
            dp = gl.zeros([ROWS, KEYS], gl.float32, layout)
            dp = add_chunks(shared, dp, rows, number, WIDTHS, 0, len(WIDTHS))
            dp = finish_product(shared, dp, number, WIDTHS)
            _pass_rope(shared, number)
            number += shared.CHUNKS + 1
            left, right = _halves(dp)
            _wait_for_probs(shared, handed)
            _write_grad_scores(shared, handed, left, 0, tile, block, row_delta, scale)
            _write_grad_scores(shared, handed, right, HALF, tile, block, row_delta, scale)
            _hand_back(shared, handed, grad_scores, tile, first_token, block)
        for block in range(_count_blocks(tile), stored_blocks):
            handed = turn * stored_blocks + block
            _wait_to_go(shared, handed)
            _wait_for_probs(shared, handed)
            shared.grad_scores.index(0).store(gl.zeros([ROWS, KEYS], dtype, layout))
            _hand_back(shared, handed, grad_scores, tile, first_token, block)
    tma.store_wait(0)


@gluon.jit
def _count_blocks(tile):
    """Blocks of keys that any row sees."""
    return (tile.keys + KEYS - 1) // KEYS


@gluon.jit
def _halves(acc):
    """Of the columns of an accumulator, each [64, 64], in the same registers.

    One after the other is made what it becomes: both at once would need more registers.
    """
    layout: gl.constexpr = accumulator_layout(HALF, 1)
    left, right = gl.split(acc.reshape([ROWS, 2, HALF]).permute([0, 2, 1]))
    left = gl.convert_layout(left, layout, assert_trivial=True)
    return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _hide(values, tile, first, layout: gl.constexpr):
    """Zero the values [64, 64] of keys, from the tile's ``first`` on, that a row does not see."""
    if first + HALF > gl.minimum(tile.offset + 1, tile.keys):
        key = first + gl.arange(0, HALF, gl.SliceLayout(0, layout))
        token = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) // tile.HEADS
        last = gl.minimum(token + tile.offset, tile.keys - 1)
        values = gl.where(key[None, :] <= last[:, None], values, 0.0)
    return values


@gluon.jit
def _wait_for_room(shared, handed):
    """Wait until the grad role has read the P before last."""
    wait_empty(shared.probs_empty, handed, HANDED)


@gluon.jit
def _wait_for_stores():
    """Wait until the P before last has left."""
    tma.store_wait(HANDED - 1)
    synchronize()


@gluon.jit
def _wait_to_go(shared, handed):
    """Wait until dP of a block may begin."""
    wait_full(shared.grad_go, handed, HANDED)


@gluon.jit
def _write_probs(shared, handed, s, column: gl.constexpr, tile, block, row_lse, scale):
    """Write P of a half of a block, which begins at a column, from S."""
    layout: gl.constexpr = accumulator_layout(HALF, 1)
    row_lse = gl.convert_layout(row_lse, gl.SliceLayout(1, layout))
    p = gl.exp2(s * (scale * LOG2_E) - row_lse[:, None])
    p = _hide(p, tile, block * KEYS + column, layout)
    place = shared.probs.index(handed % HANDED).slice(column, HALF, dim=1)
    place.store(p.to(place.dtype))


@gluon.jit
def _hand_over(shared, handed, probs, tile, first_token, block):
    """Let the grad role read P, and begin to store it."""
    fence_async_shared()
    synchronize()
    mbarrier.arrive(shared.probs_full.index(handed % HANDED))
    _store(probs, tile, first_token, block, shared.probs.index(handed % HANDED))


@gluon.jit
def _wait_for_probs(shared, handed):
    """Wait for P, and until dS of the block before has left."""
    wait_full(shared.probs_full, handed, HANDED)
    tma.store_wait(0)
    synchronize()


@gluon.jit
def _write_grad_scores(shared, handed, dp, column: gl.constexpr, tile, block, row_delta, scale):
    """Write dS of a half of a block, times the scale, from dP."""
    layout: gl.constexpr = accumulator_layout(HALF, 1)
    row_delta = gl.convert_layout(row_delta, gl.SliceLayout(1, layout))
    p = shared.probs.index(handed % HANDED).slice(column, HALF, dim=1).load(layout)
    ds = p.to(gl.float32) * (dp * scale - (row_delta * scale)[:, None])
    ds = _hide(ds, tile, block * KEYS + column, layout)
    place = shared.grad_scores.index(0).slice(column, HALF, dim=1)
    place.store(ds.to(place.dtype))


@gluon.jit
def _hand_back(shared, handed, grad_scores, tile, first_token, block):
    """Give the place of P back, and begin to store dS."""
    fence_async_shared()
    synchronize()
    mbarrier.arrive(shared.probs_empty.index(handed % HANDED))
    _store(grad_scores, tile, first_token, block, shared.grad_scores.index(0))


@gluon.jit
def _pass_rope(shared, number):
    """Release the last chunk, which only the probs role reads."""
    shared.ring.wait(number + shared.CHUNKS)
    shared.ring.release(number + shared.CHUNKS)


@gluon.jit
def _store(target, tile, first_token, block, source):
    """Begin to copy [64, 128] to where a tensor map has the tile's rows and the block's keys."""
    position = [tile.batch, tile.query_start - first_token, tile.head, block * KEYS]
    box = source._reinterpret(source.dtype, target.block_shape, target.layout)
    tma.async_copy_shared_to_global(target, position, box)


@gluon.jit(
    do_not_specialize=["total", "batches", "heads", "first_token", "stored_blocks"],
    do_not_specialize_on_alignment=["tiles"],
)
def attend_backward_stored(
    q_content,
    q_rope,
    grad_out,
    latent,
    k_rope,
    probs,
    grad_scores,
    lse,
    delta,
    tiles,
    total,
    batches,
    heads,
    first_token,
    stored_blocks,
    scale,
    C: gl.constexpr,
    R: gl.constexpr,
    HEADS: gl.constexpr,
):
    """P and dS of tiles that see keys from the same first one on, by any number of programs.

    Args:
        q_content: Tensor map of [S_q, B, N, C] in boxes [64 / HEADS, 1, HEADS, 64].
        q_rope: Of [S_q, B, N, R] in boxes [64 / HEADS, 1, HEADS, R].
        grad_out: As q_content.
        latent: Of [S_k, B, C] in boxes [128, 1, 64].
        k_rope: Of [S_k, B, R] in boxes [128, 1, R].
        probs: Of [B, tokens, N, 128 * stored_blocks] in boxes [1, 64 / HEADS, HEADS, 128], written:
            key i there is the i-th from the tiles' first on, and what no row of a tile sees is 0.
        grad_scores: As probs.
        lse: fp32 [S_q, B, N], contiguous like all that follows.
        delta: fp32 [S_q, B, N].
        tiles: int32 [tiles, 5] of these tokens, see ``query_tiles`` in tiles.py.
        total: Tiles, times entries of the batch, times groups of heads.
        batches: B.
        heads: N.
        first_token: Of ``probs``.
        stored_blocks: Of ``probs``.
        scale: Of the scores.
        C: ``kv_lora_rank``.
        R: Width of k_rope.
        HEADS: Heads in a tile.
    """
    shared = allocate(latent.dtype, C, R)
    work = ProgramTiles(tiles, total, batches, heads, HEADS)
    gl.warp_specialize(
        [
            (_probs_role, (work, shared, probs, lse, delta, first_token, stored_blocks, scale)),
            (
                _grad_role,
                (work, shared, grad_scores, lse, delta, first_token, stored_blocks, scale),
            ),
            (_load_role, (work, shared, q_content, q_rope, grad_out, latent, k_rope)),
        ],
        [4, 1],  # warps of the roles but the first, which has the launch's four
        [GRAD_REGISTERS, LOAD_REGISTERS],
    )
