"""Rows of dKV in the order in which threads have their columns.

A thread has columns 2t, 2t + 1 (t = 0 .. 3) of every 8 in a row of an accumulator. In memory the
four numbers that it has in two neighbouring groups of 8 lie next to each other, so that one
instruction adds 16 bytes, and the four threads of a row 64: of every 16 columns, four times (pair
t of the first group, pair t of the second).
"""

from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.hopper.backward_fragments import keep_order
from absorbed_mla.kernels.hopper.tile import KEYS
from absorbed_mla.kernels.triton_private import aggregate

if TYPE_CHECKING:
    from torch import Tensor


def in_order(rows: "Tensor") -> "Tensor":
    """Rows [.., W] with their columns in order."""
    parts = rows.unflatten(-1, (-1, 4, 2, 2))  # 16 columns, pair, group, column of the pair
    return parts.transpose(-2, -3).flatten(-4)


@gluon.constexpr_function
def result_layout(columns):
    """Of [64, columns] in two warpgroups, columns as in memory; no number changes its thread."""
    registers = [[0, 1], [0, 2], [8, 0]]
    registers += [[0, 1 << bit] for bit in range(4, columns.bit_length() - 2)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0], [0, columns // 2]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, columns])


@gluon.constexpr_function
def row_layout_of_results():
    """Of the rows [64], whatever the columns are."""
    return gl.SliceLayout(1, result_layout(64))


@aggregate
class KeyRows:
    """Where a block of keys gets its gradient.

    Attributes:
        dkv: Pointer.
        row: Offsets of the keys' rows, int64 [64].
        there: Which of them there are, [64].
        IN_ORDER: Whether rows are written, not added to.
    """

    dkv: gl.tensor
    row: gl.tensor
    there: gl.tensor
    IN_ORDER: gl.constexpr

    @gluon.jit
    def add(self, part, column: gl.constexpr):
        """Add an accumulator [64, W] to the columns from ``column`` on."""
        W: gl.constexpr = part.shape[1]
        layout: gl.constexpr = result_layout(W)
        rows: gl.constexpr = gl.SliceLayout(1, layout)
        part = part.reshape([KEYS, W // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([KEYS, W])
        part = gl.convert_layout(part, layout)
        offset = gl.convert_layout(self.row, rows)[:, None]
        offset = offset + gl.arange(0, W, gl.SliceLayout(0, layout))[None, :]
        mask = gl.convert_layout(self.there, rows)[:, None]
        if self.IN_ORDER:
            part = part.to(self.dkv.dtype.element_ty)
            gl.store(self.dkv + column + offset, part, mask=mask)
        else:
            gl.atomic_add(self.dkv + column + offset, part, mask=mask, sem="relaxed")
        # Else ptxas moves these behind the next product, see backward_fragments.py.
        keep_order()
