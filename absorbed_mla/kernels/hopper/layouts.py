"""Layouts: where the elements of a tile's matrices are, in registers and in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# 16-bit columns in the 128 bytes that shared memory's swizzle mixes: rows are read, written and
# loaded in pieces of so many, the widest without bank conflicts.
SWIZZLED = gl.constexpr(64)


@gluon.constexpr_function
def accumulator_layout(columns, warpgroups):
    """What products leave of [64, columns] in fp32; each warpgroup has its share of the columns.

    A warp has 16 of the rows. A thread has columns 2t, 2t + 1 (t = 0 .. 3) of every 8, in the rows
    r and r + 8 of its warp.
    """
    # Version 3.0 is Hopper's wgmma. The instruction's shape is rows of a warp, columns, and 16-bit
    # numbers that are multiplied and summed for each element.
    return gl.NVMMADistributedLayout([3, 0], [4, warpgroups], [16, columns // warpgroups, 16])


@gluon.constexpr_function
def tall_layout(columns):
    """What products leave of [128, columns] in fp32; each of two warpgroups has 64 of the rows.

    Within a warpgroup's rows numbers are where ``accumulator_layout`` has them.
    """
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16])


@gluon.constexpr_function
def sector_layout(columns, rows=64):
    """Of [rows, columns] in warps that have 16 rows each, to store 16-bit numbers.

    Rows are in the same lanes as in the accumulator's layout, but a thread has four neighbouring
    columns, and the four lanes of a row 16: a whole sector of memory, 32 bytes.
    """
    # What each bit of the number of a register, a lane and a warp adds to (row, column).
    registers = [[0, 1], [0, 2], [8, 0]]
    registers += [[0, 1 << bit] for bit in range(4, columns.bit_length() - 1)]
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    warps = [[1 << bit, 0] for bit in range(4, rows.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, columns])


@gluon.constexpr_function
def row_layout(columns, warps):
    """Of [64, columns], at most ``SWIZZLED``: a thread has 8 columns, 16 bytes, of a row."""
    lanes = columns // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def operand_layout(columns):
    """Of 16-bit matrices in shared memory that products read, [.., columns]."""
    return gl.NVMMASharedLayout(2 * min(columns, SWIZZLED.value), 16)


@gluon.constexpr_function
def block_layout(columns):
    """Of a block of keys in shared memory that products read, [64, 1, columns]."""
    return gl.NVMMASharedLayout(2 * min(columns, SWIZZLED.value), 16, rank=3)


@gluon.constexpr_function
def every_thread_layout():
    """Of [4] in the four warps of a warpgroup: each thread has all."""
    return gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0]] * 2, [], [4])
