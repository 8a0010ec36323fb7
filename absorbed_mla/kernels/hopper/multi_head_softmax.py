"""The softmax of the multi-head forward, and the rescaling of what it has added up."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.hopper.layouts import accumulator_layout
from absorbed_mla.kernels.hopper.multi_head_tile import BLOCK, ROWS

# A row's reference grows only if its exponents, of 2, would be greater than this.
_GROWTH = gl.constexpr(8.0)
# 2^x of four: three by the special function unit and one by the units that multiply and add:
# 2^round(x) times a polynomial of the rest, which is within 3e-6; exactly 0 from -127 on.
_MIXED_EXP2 = gl.constexpr(
    """
    {
    .reg .f32 a, b, c, x, t, r, p;
    .reg .b32 n, m;
    ex2.approx.ftz.f32 a, $4;
    ex2.approx.ftz.f32 b, $5;
    ex2.approx.ftz.f32 c, $6;
    max.NaN.f32 x, $7, 0fC2FE0000;
    add.rn.f32 t, x, 0f4B400000;
    sub.rn.f32 r, t, 0f4B400000;
    sub.rn.f32 r, x, r;
    fma.rn.f32 p, r, 0f3C1D4AFA, 0f3D65091D;
    fma.rn.f32 p, p, r, 0f3E7600BD;
    fma.rn.f32 p, p, r, 0f3F317071;
    fma.rn.f32 p, p, r, 0f3F800000;
    mov.b32 n, t;
    mov.b32 m, p;
    shl.b32 n, n, 23;
    add.s32 m, m, n;
    mov.b32 p, m;
    mov.f32 $0, a;
    mov.f32 $1, b;
    mov.f32 $2, c;
    mov.f32 $3, p;
    }
    """
)


@gluon.constexpr_function
def _partial_layout():
    """Of [64, 4]: what each thread of the accumulator's layout has of its rows."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.constexpr_function
def _conditional_products(count):
    """``count`` elements of two rows times factors, unless those of all rows of the warp are 1."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return f"""{{
        .reg .pred grows, other;
        setp.neu.f32 grows, ${2 * count}, 0f3F800000;
        setp.neu.f32 other, ${2 * count + 2}, 0f3F800000;
        or.pred grows, grows, other;
        vote.sync.any.pred grows, grows, 0xffffffff;
        @!grows bra.uni DONE;
        {products}
        DONE:
        }}"""


@gluon.constexpr_function
def _conditional_constraints(count):
    tied = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + tied + ["f"] * count)


@gluon.jit
def rescale(o, factor, o_layout: gl.constexpr, LAZY: gl.constexpr):
    """O [64, V] times the rows' factors [64]."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
    if LAZY:
        COUNT: gl.constexpr = o.shape[1] // 2
        o = gl.inline_asm_elementwise(
            _conditional_products(COUNT),
            _conditional_constraints(COUNT),
            [o, factor],
            dtype=gl.float32,
            is_pure=True,
            pack=COUNT,
        )
    else:
        o = o * factor
    return o


@gluon.jit
def lazy_softmax(
    s,
    top,
    true_top,
    scale,
    TREE: gl.constexpr,
    LAZY: gl.constexpr,
    RECORD: gl.constexpr,
    POLY: gl.constexpr,
):
    """One step of the online softmax, see ``online_softmax`` in forward_scores.py.

    With ``LAZY`` the rows' references, top, are replaced only where the largest score has grown by
    more than 2^8, and P is at most 2^8; true_top is the largest. With ``POLY`` a quarter of the
    exponentials is computed by multiplications and additions.
    """
    rows: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK, 1))
    if TREE:
        quarters = gl.max(s.reshape([ROWS, 4, BLOCK // 4]), axis=1)
        highest = gl.convert_layout(gl.max(quarters, axis=1), rows)
    else:
        highest = gl.max(s, axis=1)
    old_top = top
    if LAZY:
        # NaN, hence false, where neither is finite.
        grows = (highest - top) * scale > _GROWTH
        top = gl.where(grows, highest, top)
        if RECORD:
            true_top = gl.maximum(true_top, highest)
    else:
        top = gl.maximum(top, highest)
        true_top = top
    base = gl.where(top == -float("inf"), 0.0, top)
    factor = gl.exp2((old_top - base) * scale)
    if LAZY:
        factor = gl.where(grows, factor, 1.0)
    x = s * scale - (base * scale)[:, None]
    if POLY:
        p = gl.inline_asm_elementwise(_MIXED_EXP2, "=f,=f,=f,=f,f,f,f,f", [x], gl.float32, True, 4)
    else:
        p = gl.exp2(x)
    return top, true_top, factor, p


@gluon.jit
def block_sums(p, SUM: gl.constexpr):
    """Sums of P's rows: [64], or what each thread has, [64, 4]."""
    if SUM:
        sums = gl.sum(gl.sum(p.reshape([ROWS, BLOCK // 8, 4, 2]), axis=3), axis=1)
        sums = gl.convert_layout(sums, _partial_layout())
    else:
        sums = gl.sum(p, axis=1)
    return sums


@gluon.jit
def add_sums(total, factor, sums, SUM: gl.constexpr):
    """The sums so far, rescaled, and another block's."""
    if SUM:
        PARTIAL: gl.constexpr = _partial_layout()
        factor = gl.convert_layout(factor, gl.SliceLayout(1, PARTIAL))[:, None]
    return total * factor + sums


@gluon.jit
def row_sums(total, rows: gl.constexpr, SUM: gl.constexpr):
    """Sums of rows, [64]."""
    if SUM:
        total = gl.convert_layout(gl.sum(total, axis=1), rows)
    return total
