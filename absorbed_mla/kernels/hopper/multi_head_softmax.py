"""The softmax of the multi-head forward, block by block, with few instructions.

It is the online softmax (arXiv:2205.14135), P = 2^(scale * (s - top)), where top need not be the
row's largest score: the same reference in the numerator and in the denominator cancels out. So a
row keeps its reference until a block's largest score exceeds it by more than 8 in the exponent of
2 (``_GROWTH``). P is then at most 2^8, which bf16 and fp16 hold as precisely as numbers up to 1,
and the factor of what was added up is exactly 1, except in few blocks.

* The decision is the row's own, so its bits do not depend on what other rows there are.
* A warp multiplies O by factors only if one of its 16 rows has another than 1, which it finds by a
  vote. Multiplication by 1 changes nothing, so the vote does not change bits either.
* Every thread adds up what it has of a row's P; the four threads of a row are added at the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.hopper.layouts import accumulator_layout
from absorbed_mla.kernels.hopper.multi_head_tile import BLOCK, ROWS

# How much greater than by the reference, as an exponent of 2, scores may be.
_GROWTH = gl.constexpr(8.0)


@gluon.jit
def lazy_softmax(s, top, true_top, scale, RECORD: gl.constexpr):
    """One step of the online softmax.

    Args:
        s: Products of queries and keys, not scaled, [64, 128] fp32.
        top: The rows' references so far, [64]; -inf where a row has seen no key.
        true_top: The rows' largest so far, [64]; used with RECORD only.
        scale: Of the scores, positive, times log2(e).
        RECORD: Whether the rows' largest are wanted.

    Returns:
        The new top and true_top; the factor exp2(scale * (old top - new top)), [64], exactly 1
        where top stays; P = exp2(scale * (s - new top)) in fp32.
    """
    rows: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK, 1))
    # Of quarters first: four chains of instructions instead of one.
    quarters = gl.max(s.reshape([ROWS, 4, BLOCK // 4]), axis=1)
    highest = gl.convert_layout(gl.max(quarters, axis=1), rows)
    # False where both are -inf, whose difference is NaN.
    grows = (highest - top) * scale > _GROWTH
    old_top = top
    top = gl.where(grows, highest, top)
    if RECORD:
        true_top = gl.maximum(true_top, highest)
    # -inf - -inf would be NaN in rows that have seen no key yet.
    base = gl.where(top == -float("inf"), 0.0, top)
    factor = gl.where(grows, gl.exp2((old_top - base) * scale), 1.0)
    p = gl.exp2(s * scale - (base * scale)[:, None])
    return top, true_top, factor, p


@gluon.jit
def rescale(o, factor, o_layout: gl.constexpr):
    """O [64, V] times the rows' factors [64]."""
    # What a thread has of O: half of the columns of two rows, in one piece of assembly.
    COUNT: gl.constexpr = o.shape[1] // 2
    factor = gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
    return gl.inline_asm_elementwise(
        _conditional_products(COUNT),
        _conditional_constraints(COUNT),
        [o, factor],
        dtype=gl.float32,
        is_pure=True,
        pack=COUNT,
    )


@gluon.constexpr_function
def _conditional_products(count):
    """``count`` numbers times their factors, unless the factors of all rows of the warp are 1.

    A thread has two rows: two numbers of the first, two of the second, two of the first, ..
    """
    first, second = 2 * count, 2 * count + 2
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return f"""{{
        .reg .pred grows, other;
        setp.neu.f32 grows, ${first}, 0f3F800000;
        setp.neu.f32 other, ${second}, 0f3F800000;
        or.pred grows, grows, other;
        vote.sync.any.pred grows, grows, 0xffffffff;
        @!grows bra.uni DONE;
        {products}
        DONE:
        }}"""


@gluon.constexpr_function
def _conditional_constraints(count):
    """Outputs; the numbers, in the registers of the outputs; factors."""
    tied = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + tied + ["f"] * count)


@gluon.constexpr_function
def _partial_layout():
    """Of [64, 4]: a thread has the sums of the columns that it has of S, in each of its rows."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.jit
def partial_sums(p):
    """What each thread has of the sums of P's rows, [64, 4]."""
    sums = gl.sum(gl.sum(p.reshape([ROWS, BLOCK // 8, 4, 2]), axis=3), axis=1)
    return gl.convert_layout(sums, _partial_layout())


@gluon.jit
def add_sums(total, factor, sums):
    """The sums so far, rescaled, and another block's, [64, 4]."""
    PARTIAL: gl.constexpr = _partial_layout()
    factor = gl.convert_layout(factor, gl.SliceLayout(1, PARTIAL))[:, None]
    return total * factor + sums


@gluon.jit
def row_sums(total, rows: gl.constexpr):
    """The rows' sums, [64]."""
    return gl.convert_layout(gl.sum(total, axis=1), rows)


@gluon.jit
def add_sink(total, reference, logit):
    """The rows' sums beside a sink, relative to the larger of reference and logit.

    Args:
        total: The sums, [64]; 0 where a row has seen no key.
        reference: Of the rows, an exponent of 2; -inf there.
        logit: Of the sink, likewise.

    Returns:
        Sums, their reference, and the factor of what was relative to the old one.
    """
    greater = gl.maximum(reference, logit)
    kept = gl.exp2(reference - greater)
    return total * kept + gl.exp2(logit - greater), greater, kept
