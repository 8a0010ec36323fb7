"""dQ of multi-head attention in the order of fragments; see backward_fragments.py.

Here the two warpgroups' groups of 8 columns alternate: a thread's place among the others is then
its number, for accumulators of any width, and takes one register.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.hopper.backward_fragments import _offsets

# Bytes of a thread's four numbers, of the four threads of a row, of a warp's rows, of a warpgroup's
# group of 8 columns, and of both warpgroups'.
_FRAGMENT = gl.constexpr(16)
_ROW = gl.constexpr(4 * 16)
_WARP = gl.constexpr(8 * 4 * 16)
_WARPGROUP = gl.constexpr(4 * 8 * 4 * 16)
_GROUP = gl.constexpr(2 * 4 * 8 * 4 * 16)


@gluon.jit
def add_fragments(part, target):
    """Add an accumulator [64, W] of two warpgroups to W * 64 numbers at ``target``."""
    W: gl.constexpr = part.shape[1]
    GROUPS: gl.constexpr = W // 16  # of each warpgroup
    # [warps, halves of its rows, rows, warpgroups, groups, pairs, columns]
    #   -> [warps, rows, warpgroups, groups, pairs, halves, columns]
    part = part.reshape(4, 2, 8, 2, GROUPS, 4, 2).permute(0, 2, 3, 4, 5, 1, 6)
    even, odd = part.split()
    x0, x2 = even.split()
    x1, x3 = odd.split()
    layout: gl.constexpr = x0.type.layout
    # The thread's part of the address is one register, the group's a number in the instruction.
    thread = (
        _offsets(layout, 2, 2, _WARPGROUP)
        + _offsets(layout, 0, 4, _WARP)
        + _offsets(layout, 1, 8, _ROW)
        + _offsets(layout, 4, 4, _FRAGMENT)
    )
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",
        "=r,l,f,f,f,f",
        [target.to(gl.uint64) + thread + _offsets(layout, 3, GROUPS, _GROUP), x0, x1, x2, x3],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    keep_order()


@gluon.jit
def keep_order():
    """Keep ptxas from moving what reads or writes memory across; the registers do not suffice."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1
    )
