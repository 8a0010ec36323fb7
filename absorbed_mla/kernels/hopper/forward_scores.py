"""Scores of the forward kernel: the product with a block of keys, who sees whom, the softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from absorbed_mla.kernels.hopper.forward_shared import chunk_full, keys_are_there
from absorbed_mla.kernels.hopper.layouts import every_thread_layout
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS

# A row's reference changes when its largest product, scaled, has grown by more: P is at most
# 2^8 then, of which 16-bit floats lose nothing, and rows are seldom rescaled.
_GROWTH = gl.constexpr(8.0)


@gluon.jit
def rope_queries(shared, layout: gl.constexpr):
    """k_rope's queries, operand of S in ``layout``: [64, R], in registers if there is room."""
    queries = shared.q_rope.reshape([ROWS, shared.R])
    if shared.IN_REGISTERS == 2:
        found = queries.load(gl.DotOperandLayout(0, layout, 2))
    else:
        found = queries
    return found


@gluon.jit
def start_scores(shared, stage, parity, layout: gl.constexpr):
    """Queue the first chunk's part of S = Q K^T, [64, 64] fp32, when the chunk has come."""
    s = gl.zeros([ROWS, KEYS], gl.float32, layout)
    return _add_chunk(shared, s, stage, parity, 0)


@gluon.jit
def finish_scores(shared, s, q_rope, stage, parity):
    """Queue the parts of the other chunks and, last, of k_rope, each when it has come."""
    for column in gl.static_range(shared.CHUNK, shared.C, shared.CHUNK):
        s = _add_chunk(shared, s, stage, parity, column)
    keys = shared.k_rope(stage).reshape([KEYS, shared.R])
    keys_are_there(shared, shared.rope_full.index(stage), parity)
    return warpgroup_mma(q_rope, keys.permute((1, 0)), s, is_async=True)


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
    """One step of the online softmax; P and factors go to shared memory, ``p_full`` says so.

    Args:
        s: Products of queries and keys, not scaled, [64, 64] fp32.
        top: The rows' references so far, [64].
        total: The rows' sums of exp2(scale * (s - top)) so far, [64].
        stage: Where the block is.
        scale: Of the scores, times log2(e).

    Returns:
        The new top and total, the factor, as ``online_softmax`` has them, and P in 16 bits.
    """
    top, factor, p = online_softmax(s, top, scale, _GROWTH)
    changes = (factor != 1.0).to(gl.int32).reshape([4, ROWS // 4])
    shared.changes.index(stage).store(gl.max(changes, axis=1))
    shared.factor.index(stage).store(factor)
    probs = p.to(shared.rope.dtype)
    shared.probs(stage).store(probs)
    fence_async_shared()
    mbarrier.arrive(shared.p_full.index(stage))
    return top, total * factor + gl.sum(p, axis=1), factor, probs


@gluon.jit
def online_softmax(s, top, scale, GROWTH: gl.constexpr = 0.0):
    """One step of the online softmax (arXiv:2205.14135), rescaled where it matters.

    A row's reference, from which exponents are counted, is the largest product at first and
    whenever that, scaled, has grown by more than GROWTH. Every row decides for itself: its bits do
    not depend on others.

    Args:
        s: As in ``softmax``, of any block, like the next two.
        GROWTH: With 0 the reference is the largest product so far.

    Returns:
        The new top, the factor exp2(scale * (old top - new top)), exactly 1 where the reference
        stays, each [64], and P = exp2(scale * (s - new top)) in fp32.
    """
    largest = gl.max(s, axis=1)
    # -inf - -inf is NaN, which is not greater: rows that have seen no key yet.
    grows = (largest - top) * scale > GROWTH
    old_top = top
    top = gl.where(grows, largest, top)
    factor = gl.where(grows, gl.exp2((old_top - top) * scale), 1.0)
    base = gl.where(top == -float("inf"), 0.0, top)
    p = gl.exp2(s * scale - (base * scale)[:, None])
    return top, factor, p


@gluon.jit
def some_change(shared, stage):
    """Whether the block in a stage has a factor other than 1."""
    return gl.max(shared.changes.index(stage).load(every_thread_layout()), axis=0) != 0
