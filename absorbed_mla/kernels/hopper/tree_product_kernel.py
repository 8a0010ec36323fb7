"""The Hopper GEMM of parity mode whose sums are a binary tree over leaves (invariant/tree.py).

Its roles are those of product_kernel.py. A tile is 128 x 128 elements, so that a multiply role has
registers for the leaf that it sums and for two others: the sum of four leaves is made of these. The
sum of the four before waits in shared memory, that of eight and more in the role's global scratch,
which stays in L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from absorbed_mla.kernels.hopper.backward_fragments import keep_order
from absorbed_mla.kernels.hopper.layouts import accumulator_layout
from absorbed_mla.kernels.hopper.product_kernel import (
    LATER,
    LOAD_REGISTERS,
    MULTIPLY_REGISTERS,
    Work,
    halves,
    load_step,
    store_quarter,
    sum_steps,
)
from absorbed_mla.kernels.hopper.product_shared import QUARTER, ROWS, STEP, allocate

# Columns of a tile.
WIDTH = gl.constexpr(128)
# Leaves that are summed without global memory.
_TOGETHER = gl.constexpr(8)
_SUMS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.constexpr_function
def waiting_levels(leaves):
    """Levels of a tree on which sums wait in memory, at least one."""
    return max((leaves // _TOGETHER.value).bit_length() - 1, 1)


@gluon.jit
def _load_role(work, shared, left, right, LEAVES: gl.constexpr, RUNS: gl.constexpr):
    """Load the operands of every step when its stage is free."""
    index = gl.to_tensor(0)
    RUN: gl.constexpr = LEAVES // RUNS
    for tile in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        row, column = work.place(tile, WIDTH)
        for leaf in range(LEAVES):
            first = (leaf % RUNS * RUN + leaf // RUNS) * work.part_steps
            for step in range(work.part_steps):
                full = shared.ring.acquire(index, left.block_type.nbytes + right.block_type.nbytes)
                stage, _ = shared.ring.position(index)
                summand = (first + step) * STEP
                load_step(left, row, summand, full, shared.left.index(stage))
                load_step(right, column, summand, full, shared.right.index(stage))
                index += 1


@gluon.jit
def _multiply_role(
    work,
    shared,
    sums,
    result,
    waiting,
    ROLE: gl.constexpr,
    LEAVES: gl.constexpr,
    FP32: gl.constexpr,
):
    """Compute 64 of the rows of every tile."""
    index = gl.to_tensor(0)
    if ROLE == 1 and work.steps > LATER:
        mbarrier.wait(shared.ring.full.index(LATER), 0)
    # [2, levels, 64, 128] of each program, of which a role has one.
    waiting += (gl.program_id(0) * 2 + ROLE) * (waiting_levels(LEAVES) * ROWS * WIDTH)
    for tile in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        total = _sum(work, shared, index, sums.index(ROLE), waiting, ROLE, LEAVES)
        index += work.steps
        row, column = work.place(tile, WIDTH)
        row += ROLE * ROWS
        parts = halves(total)
        for number in gl.static_range(2):
            first = column + number * QUARTER
            if FP32:
                _store_fp32(result, parts[number], row, first, work)
            else:
                store_quarter(shared, result, parts[number], row, first, ROLE, number)
    tma.store_wait(0)


@gluon.jit
def _sum(work, shared, index, sums, waiting, ROLE: gl.constexpr, LEAVES: gl.constexpr):
    """The sums of 64 rows of a tile, [64, 128], from the program's ``index``-th step on."""
    steps = work.part_steps
    if LEAVES <= _TOGETHER:
        total = _sum_leaves(shared, index, steps, sums, ROLE, LEAVES)
    else:
        # Levels by an if each: Triton 3.6 does not compile a while here for two groups.
        LEVELS: gl.constexpr = waiting_levels(LEAVES)
        for group in range(LEAVES // _TOGETHER - 1):
            some = _sum_leaves(shared, index, steps, sums, ROLE, _TOGETHER)
            index = index + _TOGETHER * steps
            target = waiting
            for level in gl.static_range(LEVELS - 1):
                if group % (2 << level) == (2 << level) - 1:
                    some = _waiting(waiting, level) + some
                    target = waiting + (level + 1) * (ROWS * WIDTH)
            gl.store(target + _places(WIDTH, WIDTH), some)
            # Else ptxas stores it behind the next product, for which registers do not suffice.
            keep_order()
        total = _sum_leaves(shared, index, steps, sums, ROLE, _TOGETHER)
        for level in gl.static_range(LEVELS):
            total = _waiting(waiting, level) + total
    return total


@gluon.jit
def _sum_leaves(shared, index, steps, sums, ROLE: gl.constexpr, LEAVES: gl.constexpr):
    """The tree over so many leaves, from the program's ``index``-th step on."""
    if LEAVES == 1:
        # +0 where a sum is -0, as in product_kernel.py. And a new value: ptxas would keep the
        # accumulator itself on the stack, from step to step.
        total = sum_steps(shared, index, steps, ROLE, WIDTH) + 0.0
    else:
        HALF: gl.constexpr = LEAVES // 2
        left = _sum_leaves(shared, index, steps, sums, ROLE, HALF)
        if LEAVES == _TOGETHER:
            sums.store(left)
        right = _sum_leaves(shared, index + HALF * steps, steps, sums, ROLE, HALF)
        if LEAVES == _TOGETHER:
            left = sums.load(accumulator_layout(WIDTH, 1))
        total = left + right
    return total


@gluon.jit
def _waiting(waiting, LEVEL: gl.constexpr):
    """The sum that waits on a level."""
    return gl.load(waiting + LEVEL * (ROWS * WIDTH) + _places(WIDTH, WIDTH))


@gluon.jit
def _places(COLUMNS: gl.constexpr, width):
    """Offsets of an accumulator's elements in rows of so many."""
    layout: gl.constexpr = accumulator_layout(COLUMNS, 1)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return row[:, None] * width + column[None, :]


@gluon.jit
def _store_fp32(result, values, row, column, work):
    """Write half of a role's result in fp32."""
    layout: gl.constexpr = accumulator_layout(QUARTER, 1)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)) < work.rows
    columns = column + gl.arange(0, QUARTER, gl.SliceLayout(0, layout)) < work.columns
    result += gl.to_tensor(row).to(gl.int64) * work.columns + column
    there = rows[:, None] & columns[None, :]
    gl.store(result + _places(QUARTER, work.columns), values, mask=there)


@gluon.jit(
    do_not_specialize=["row_tiles", "column_tiles", "steps", "leaf_steps", "rows", "columns"]
)
def multiply_leaves(
    left,
    right,
    result,
    waiting,
    row_tiles,
    column_tiles,
    steps,
    leaf_steps,
    rows,
    columns,
    STAGES: gl.constexpr,
    LEAVES: gl.constexpr,
    RUNS: gl.constexpr,
    FP32: gl.constexpr,
):
    """The product of rows and columns, by any number of programs.

    Args:
        left: Tensor map of [rows, summands] in boxes [128, 64], or of [summands, rows] in boxes
            [64, 128].
        right: Likewise of [columns, summands], or of [summands, columns].
        result: Of [rows, columns] in boxes [64, 64], or with FP32 [rows, columns], contiguous.
        waiting: Fp32 [programs, 2, waiting_levels, 64, 128].
        row_tiles: See ``Work``, like the next five; a leaf is a part.
        STAGES: Of the ring, at most 4.
        LEAVES: Of the tree, a power of 2.
        RUNS: As in invariant/tree_product.py.
        FP32: Whether the result is in fp32.
    """
    work = Work(row_tiles, column_tiles, steps, leaf_steps, rows, columns)
    shared = allocate(left, right, STAGES)
    sums = gl.allocate_shared_memory(gl.float32, [2, ROWS, WIDTH], _SUMS)
    gl.warp_specialize(
        [
            (_multiply_role, (work, shared, sums, result, waiting, 0, LEAVES, FP32)),
            (_multiply_role, (work, shared, sums, result, waiting, 1, LEAVES, FP32)),
            (_load_role, (work, shared, left, right, LEAVES, RUNS)),
        ],
        [4, 1],  # as in product_kernel.py
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )
