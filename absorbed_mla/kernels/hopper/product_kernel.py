"""The Hopper GEMM of parity mode: each element is summed in the order of invariant/parts.py.

A program computes one tile of 128 x 256 elements after another. The warps have three roles:

* ``_load_role``, one warp: copies 64 summands of the tile's rows and columns after 64 to a ring of
  stages by tensor maps (TMA), also those of the next tile while this one is being finished.
* ``_multiply_role``, twice four warps: the sums of 64 of the rows, and their way to the result.

A role has registers for the sums of a part, which the tensor cores add to, and for three quarters
as many others. So of the sums of the parts before, it keeps three quarters of the columns there and
one in shared memory, where results wait later until they are copied to memory.

While a role does something else than to multiply, the other multiplies, if it is behind or ahead.
So the second role begins a stage later.

Barriers, one for each stage, are passed once for each step:

* ``full``: the operands are there.
* ``empty``: both multiply roles are done with them.

A wait names the parity of the phase that it waits for. The phase before the first, which is named
for what was not used yet, counts as passed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from absorbed_mla.kernels.hopper.layouts import accumulator_layout
from absorbed_mla.kernels.hopper.product_shared import (
    BUFFERS,
    COLUMNS,
    QUARTER,
    ROWS,
    STEP,
    allocate,
    is_transposed,
)
from absorbed_mla.kernels.hopper.synchronize import synchronize
from absorbed_mla.kernels.invariant.groups import place_in_groups
from absorbed_mla.kernels.triton_private import aggregate

# Registers of each thread of the roles but the first. At launch three warpgroups (the load role's
# warp counts as one) have 168 each; the first gets what the others leave of these 504: 240.
MULTIPLY_REGISTERS = gl.constexpr(240)
LOAD_REGISTERS = gl.constexpr(24)
# Tiles of rows that are computed side by side: 132 programs read 16 of these and 8 of columns.
_GROUP = gl.constexpr(16)
# Stages that the second role begins later, fewer than there are.
LATER = gl.constexpr(1)
_place_in_groups = gluon.jit(place_in_groups)


@aggregate
class Work:
    """What all programs have to do.

    Attributes:
        row_tiles: Tiles of the product that lie below each other.
        column_tiles: Those beside each other.
        steps: Of an element's sum, each of 64 summands.
        part_steps: Of each of its parts but the last.
        rows: Of the product.
        columns: Of the product.
    """

    row_tiles: gl.tensor
    column_tiles: gl.tensor
    steps: gl.tensor
    part_steps: gl.tensor
    rows: gl.tensor
    columns: gl.tensor

    @gluon.jit
    def count(self):
        """Tiles."""
        return self.row_tiles * self.column_tiles

    @gluon.jit
    def place(self, tile, WIDTH: gl.constexpr):
        """First row and column of a tile that has so many columns."""
        row, column = _place_in_groups(tile, self.row_tiles, self.column_tiles, _GROUP)
        return row * (2 * ROWS), column * WIDTH

    @gluon.jit
    def parts_before_the_last(self):
        """How many there are."""
        return (self.steps - 1) // self.part_steps


@gluon.jit
def _load_role(work, shared, left, right):
    """Load the operands of every step when its stage is free."""
    index = gl.to_tensor(0)
    for tile in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        row, column = work.place(tile, COLUMNS)
        for step in range(work.steps):
            full = shared.ring.acquire(index, left.block_type.nbytes + right.block_type.nbytes)
            stage, _ = shared.ring.position(index)
            load_step(left, row, step * STEP, full, shared.left.index(stage))
            load_step(right, column, step * STEP, full, shared.right.index(stage))
            index += 1


@gluon.jit
def load_step(operand, first, summand, full, target):
    """Begin to load summands of the rows or columns from ``first`` on."""
    if is_transposed(operand.block_shape):
        tma.async_copy_global_to_shared(operand, [summand, first], full, target)
    else:
        tma.async_copy_global_to_shared(operand, [first, summand], full, target)


@gluon.jit
def _multiply_role(
    work, shared, result, bias, ROLE: gl.constexpr, SEVERAL: gl.constexpr, HAS_BIAS: gl.constexpr
):
    """Compute 64 of the rows of every tile."""
    index = gl.to_tensor(0)
    if ROLE == 1 and work.steps > LATER:
        mbarrier.wait(shared.ring.full.index(LATER), 0)
    for tile in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        quarters = _sum(work, shared, index, ROLE, SEVERAL)
        index += work.steps
        row, column = work.place(tile, COLUMNS)
        row += ROLE * ROWS
        for number in gl.static_range(4):
            values = quarters[number]
            first = column + number * QUARTER
            if HAS_BIAS:
                values = _add_bias(values, bias, first, work.columns)
            store_quarter(shared, result, values, row, first, ROLE, number)
    tma.store_wait(0)


@gluon.jit
def _sum(work, shared, index, ROLE: gl.constexpr, SEVERAL: gl.constexpr):
    """A tile's sums, of which step 0 is the program's ``index``-th, as four times [64, 64]."""
    layout: gl.constexpr = accumulator_layout(QUARTER, 1)
    steps = work.steps
    if SEVERAL:
        sums = shared.sums(ROLE)
        total_0 = gl.zeros([ROWS, QUARTER], gl.float32, layout)
        total_1, total_2 = total_0, total_0
        parts = work.parts_before_the_last()
        for part in range(parts):
            q_0, q_1, q_2, q_3 = _sum_part(shared, index, work.part_steps, ROLE)
            index = index + work.part_steps
            total_0 = total_0 + q_0
            total_1 = total_1 + q_1
            total_2 = total_2 + q_2
            if part > 0:
                q_3 = q_3 + sums.load(layout)
            else:
                q_3 = q_3 + 0.0
                # The results of the tile before have left.
                tma.store_wait(0)
                synchronize()
            sums.store(q_3)
        steps = steps - parts * work.part_steps
        q_0, q_1, q_2, q_3 = _sum_part(shared, index, steps, ROLE)
        quarters = (q_0 + total_0, q_1 + total_1, q_2 + total_2, q_3 + sums.load(layout))
    else:
        q_0, q_1, q_2, q_3 = _sum_part(shared, index, steps, ROLE)
        # A sum of parts begins with +0, which makes +0 of a part that is -0.
        quarters = (q_0 + 0.0, q_1 + 0.0, q_2 + 0.0, q_3 + 0.0)
    return quarters


@gluon.jit
def _sum_part(shared, index, steps, ROLE: gl.constexpr):
    """The sums of so many steps, as four times [64, 64]."""
    left, right = halves(sum_steps(shared, index, steps, ROLE, COLUMNS))
    return halves(left) + halves(right)


@gluon.jit
def sum_steps(shared, index, steps, ROLE: gl.constexpr, WIDTH: gl.constexpr):
    """The sums of so many steps, [64, WIDTH], and of no other order than that of all widths."""
    acc = gl.zeros([ROWS, WIDTH], gl.float32, accumulator_layout(WIDTH, 1))
    acc = _queue(shared, index, acc, ROLE, False)
    acc = warpgroup_mma_wait(1, deps=[acc])
    for step in range(1, steps):
        acc = _queue(shared, index + step, acc, ROLE, True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        shared.ring.release(index + step - 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    shared.ring.release(index + steps - 1)
    return acc


@gluon.jit
def halves(x):
    """Of the columns of an accumulator, without moving a number."""
    WIDTH: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = accumulator_layout(WIDTH, 1)
    left, right = gl.split(x.reshape([ROWS, 2, WIDTH]).permute([0, 2, 1]))
    left = gl.convert_layout(left, layout, assert_trivial=True)
    return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _queue(shared, index, acc, ROLE: gl.constexpr, ADDED: gl.constexpr):
    """Queue the product of a step when its operands are there."""
    shared.ring.wait(index)
    stage, _ = shared.ring.position(index)
    rows, columns = shared.operands(stage, ROLE)
    return warpgroup_mma(rows, columns, acc, use_acc=ADDED, is_async=True)


@gluon.jit
def _add_bias(values, bias, first, columns):
    """Add that of the columns from ``first`` on, in fp32."""
    layout: gl.constexpr = gl.SliceLayout(0, accumulator_layout(QUARTER, 1))
    # A column for each thread, then 16 for each: so many addresses would need too many registers.
    column = first + gl.arange(0, QUARTER, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    added = gl.load(bias + column, mask=column < columns, other=0.0).to(gl.float32)
    return values + gl.convert_layout(added, layout)[None, :]


@gluon.jit
def store_quarter(shared, result, values, row, column, ROLE: gl.constexpr, NUMBER: gl.constexpr):
    """Begin to copy a quarter of a role's result to memory, when there is room for it."""
    tma.store_wait(BUFFERS - 1)
    synchronize()
    buffer = shared.buffer(ROLE, NUMBER)
    buffer.store(values.to(buffer.dtype))
    fence_async_shared()
    synchronize()
    tma.async_copy_shared_to_global(result, [row, column], buffer)


@gluon.jit(
    do_not_specialize=["row_tiles", "column_tiles", "steps", "part_steps", "rows", "columns"]
)
def multiply_rows(
    left,
    right,
    result,
    bias,
    row_tiles,
    column_tiles,
    steps,
    part_steps,
    rows,
    columns,
    STAGES: gl.constexpr,
    SEVERAL: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """The product of rows and columns, by any number of programs.

    Args:
        left: Tensor map of [rows, summands] in boxes [128, 64], or of [summands, rows] in boxes
            [64, 128].
        right: Likewise of [columns, summands] in boxes [256, 64], or of [summands, columns] in
            boxes [64, 256].
        result: Of [rows, columns] in boxes [64, 64].
        bias: [columns], contiguous; not read without HAS_BIAS.
        row_tiles: See ``Work``, like the next five.
        STAGES: Of the ring, at most 4.
        SEVERAL: Whether there is more than one part.
        HAS_BIAS: Whether there is one.
    """
    work = Work(row_tiles, column_tiles, steps, part_steps, rows, columns)
    shared = allocate(left, right, STAGES)
    gl.warp_specialize(
        [
            (_multiply_role, (work, shared, result, bias, 0, SEVERAL, HAS_BIAS)),
            (_multiply_role, (work, shared, result, bias, 1, SEVERAL, HAS_BIAS)),
            (_load_role, (work, shared, left, right)),
        ],
        [4, 1],  # warps of the roles but the first, which has the launch's four
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )
