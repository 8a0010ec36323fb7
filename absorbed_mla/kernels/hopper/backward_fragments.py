"""The accumulator layout of dKV: MMA fragments, added to global memory by 16-byte reductions.

A fragment is the four numbers of an accumulator that a thread has in two rows and two neighbouring
columns. Laid next to each other they are 16 bytes, which one instruction reduces into memory, and
the fragments of a warp are 512 contiguous bytes; in the order of rows they would be scattered.

A block of 64 keys in fp32, from the outermost: groups of 8 columns, 4 warps (16 rows each), 8 rows
r, 4 pairs of columns, the rows r and r + 8, the two columns of the pair.
"""

from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.hopper.tile import KEYS
from absorbed_mla.kernels.triton_private import aggregate

if TYPE_CHECKING:
    from torch import Tensor

# Bytes of a thread's four numbers, of the four threads of a row, of a warp's rows, and of the 64
# rows of a group.
_FRAGMENT = gl.constexpr(16)
_ROW = gl.constexpr(4 * 16)
_WARP = gl.constexpr(8 * 4 * 16)
_GROUP = gl.constexpr(4 * 8 * 4 * 16)


def in_order(dkv: "Tensor", columns: int, keys: int) -> "Tensor":
    """What ``reduce_fragments`` left, as [S_k, B, columns].

    Args:
        dkv: [B, blocks, 64 * columns].
        columns: C + R.
        keys: S_k; the last block may have more.
    """
    batch, blocks = dkv.shape[:2]
    fragments = dkv.view(batch, blocks, columns // 8, 4, 8, 4, 2, 2)
    # -> block, warp, half of its rows, row; batch; group, pair, column
    ordered = fragments.permute(1, 3, 6, 4, 0, 2, 5, 7)
    return ordered.reshape(blocks * KEYS.value, batch, columns)[:keys]


@aggregate
class Fragments:
    """Where a block of keys has its gradient.

    Attributes:
        target: Pointer to its 64 * (C + R) numbers.
    """

    target: gl.tensor

    @gluon.jit
    def add(self, part, column: gl.constexpr):
        """Add an accumulator [64, W] to the columns from ``column`` on."""
        reduce_fragments(part, self.target + column * KEYS)


@gluon.jit
def reduce_fragments(part, target):
    """Add an accumulator [64, W] of two warpgroups to W * 64 numbers at ``target``."""
    # The second warpgroup's groups of columns follow those of the first.
    WARPGROUP: gl.constexpr = part.shape[1] // 16 * _GROUP
    reduce_groups(part, target, WARPGROUP, _GROUP)


@gluon.jit
def reduce_groups(part, target, WARPGROUP: gl.constexpr, GROUP: gl.constexpr):
    """Add an accumulator [64, W] of two warpgroups to W * 64 numbers at ``target``.

    Args:
        part: The accumulator.
        target: Pointer to the numbers.
        WARPGROUP: Bytes from the first group of 8 columns of a warpgroup to that of the other.
        GROUP: Bytes from a warpgroup's group to its next.
    """
    GROUPS: gl.constexpr = part.shape[1] // 16  # of each warpgroup
    # [warps, halves of its rows, rows, warpgroups, groups, pairs, columns]
    #   -> [warps, rows, warpgroups, groups, pairs, halves, columns]
    part = part.reshape(4, 2, 8, 2, GROUPS, 4, 2).permute(0, 2, 3, 4, 5, 1, 6)
    even, odd = part.split()
    x0, x2 = even.split()
    x1, x3 = odd.split()
    layout: gl.constexpr = x0.type.layout
    # The thread's part of the address is one register, the group's a number in the instruction.
    thread = (
        _offsets(layout, 2, 2, WARPGROUP)
        + _offsets(layout, 0, 4, _WARP)
        + _offsets(layout, 1, 8, _ROW)
        + _offsets(layout, 4, 4, _FRAGMENT)
    )
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",
        "=r,l,f,f,f,f",
        [target.to(gl.uint64) + thread + _offsets(layout, 3, GROUPS, GROUP), x0, x1, x2, x3],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    # Else ptxas moves these reductions behind the next product, whose accumulator then needs
    # registers of its own.
    keep_order()


@gluon.jit
def keep_order():
    """Keep ptxas from moving what reads or writes memory across; the registers do not suffice."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _offsets(layout: gl.constexpr, dim: gl.constexpr, length: gl.constexpr, step: gl.constexpr):
    """0, step, 2 step, .. along one of five dimensions, uint64."""
    offsets = gl.arange(0, length, _only(layout, dim, 5)) * step
    for other in gl.static_range(5):
        if other != dim:
            offsets = offsets.expand_dims(other)
    return offsets.to(gl.uint64)


@gluon.constexpr_function
def _only(layout, dim, rank):
    """The layout of dimension ``dim`` alone."""
    for other in reversed(range(rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout
