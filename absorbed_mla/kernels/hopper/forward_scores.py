"""Scores of the forward kernel: the product with a block of keys, who sees whom, the softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from absorbed_mla.kernels.hopper.forward_shared import chunk_full, keys_are_there
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS


@gluon.jit
def start_scores(shared, stage, parity, layout: gl.constexpr):
    """Queue the first chunk's part of S = Q K^T, [64, 64] fp32, when the chunk has come."""
    s = gl.zeros([ROWS, KEYS], gl.float32, layout)
    return _add_chunk(shared, s, stage, parity, 0)


@gluon.jit
def finish_scores(shared, s, stage, parity):
    """Queue the parts of the other chunks and of k_rope, each when it has come."""
    for column in gl.static_range(shared.CHUNK, shared.C, shared.CHUNK):
        s = _add_chunk(shared, s, stage, parity, column)
    queries = shared.q_rope.reshape([ROWS, shared.R])
    keys = shared.k_rope(stage).reshape([KEYS, shared.R])
    keys_are_there(shared, shared.rope_full.index(stage), parity)
    return warpgroup_mma(queries, keys.permute((1, 0)), s, is_async=True)


@gluon.jit
def _add_chunk(shared, s, stage, parity, column: gl.constexpr):
    """Queue the part of the chunk that begins at a column."""
    HALF: gl.constexpr = shared.C // 2
    half = shared.left if column < HALF else shared.right
    keys = half.index(stage).reshape([KEYS, HALF]).slice(column % HALF, shared.CHUNK, dim=1)
    queries = shared.q_content.reshape([ROWS, shared.C]).slice(column, shared.CHUNK, dim=1)
    keys_are_there(shared, chunk_full(shared, stage, column), parity)
    return warpgroup_mma(queries, keys.permute((1, 0)), s, use_acc=column > 0, is_async=True)


@gluon.jit
def count_blocks(tile):
    """Blocks of keys. A tile without keys has one, which is hidden from all rows."""
    return gl.maximum((tile.keys + KEYS - 1) // KEYS, 1)


@gluon.jit
def hide(s, tile, block, layout: gl.constexpr):
    """Set the scores [64, 64] of keys that a row does not see to -inf."""
    return gl.where(tile.sees(block, layout), s, -float("inf"))


@gluon.jit
def softmax(shared, s, top, total, stage, scale):
    """One step of the online softmax; P and the factor go to shared memory, ``p_full`` says so.

    Args:
        s: Products of queries and keys, not scaled, [64, 64] fp32.
        top: The rows' largest so far, [64].
        total: The rows' sums of exp2(scale * (s - top)) so far, [64].
        stage: Where the block is.
        scale: Of the scores, times log2(e).

    Returns:
        The new top and total, and the factor exp2(scale * (old top - new top)), each [64].
    """
    top, factor, p = online_softmax(s, top, scale)
    shared.factor.index(stage).store(factor)
    shared.probs(stage).store(p.to(shared.rope.dtype))
    fence_async_shared()
    mbarrier.arrive(shared.p_full.index(stage))
    return top, total * factor + gl.sum(p, axis=1), factor


@gluon.jit
def online_softmax(s, top, scale):
    """One step of the online softmax (arXiv:2205.14135).

    Args:
        s: As in ``softmax``, of any block.
        top: Likewise.
        scale: Likewise.

    Returns:
        The new top and the factor, as there, and P = exp2(scale * (s - new top)) in fp32.
    """
    old_top = top
    top = gl.maximum(top, gl.max(s, axis=1))
    # -inf - -inf would be NaN in rows that have seen no key yet.
    base = gl.where(top == -float("inf"), 0.0, top)
    # The difference first: a block that brings no greater score must give exactly 1, which a fused
    # multiply-add of two products does not, and the bits would depend on masked blocks.
    factor = gl.exp2((old_top - base) * scale)
    p = gl.exp2(s * scale - (base * scale)[:, None])
    return top, factor, p
