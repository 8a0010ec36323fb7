"""Shared memory of the Hopper GEMM, and the barriers that say what is in it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from absorbed_mla.kernels.hopper.backward_shared import allocate_operand
from absorbed_mla.kernels.hopper.layouts import SWIZZLED
from absorbed_mla.kernels.hopper.ring import Ring, new_barriers
from absorbed_mla.kernels.triton_private import aggregate

# Rows of a role: the M of a warpgroup's product. A tile has those of two roles.
ROWS = gl.constexpr(64)
# Columns of a tile, the widest N of a product: shared memory brings 10 KiB for each step of 16
# summands, for which the tensor cores take 128 cycles.
COLUMNS = gl.constexpr(256)
# Of these a role keeps the last in shared memory, and the others in registers.
QUARTER = gl.constexpr(64)
# Quarters of a role's result that leave at one time; their memory has room for one in fp32.
BUFFERS = gl.constexpr(2)
# Summands that arrive together.
STEP = SWIZZLED
# Of fp32 in the accumulator's layout: the rows of a warp are in different banks.
_SUMS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@aggregate
class ProductStorage:
    """Buffers, and barriers that product_kernel.py describes.

    Attributes:
        left: Of the stages, [stages, 128, 64], or [stages, 64, 128] where rows lie side by side.
        right: Likewise, [stages, 256, 64], or [stages, 64, 256] where columns do.
        kept: Results on their way to memory, [4, 64, 64]: two buffers of each role.
        ring: Of the stages.
    """

    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    kept: gl.shared_memory_descriptor
    ring: Ring

    @gluon.jit
    def operands(self, stage, role: gl.constexpr):
        """Rows [64, 64] of a role and columns [64, 256]."""
        rows, columns = self.left.index(stage), self.right.index(stage)
        if is_transposed(rows.shape):
            rows = rows.slice(role * ROWS, ROWS, dim=1).permute((1, 0))
        else:
            rows = rows.slice(role * ROWS, ROWS, dim=0)
        if not is_transposed(columns.shape):
            columns = columns.permute((1, 0))
        return rows, columns

    @gluon.jit
    def buffer(self, role: gl.constexpr, quarter: gl.constexpr):
        """Where a quarter of the columns of a role's result leaves from, [64, 64]."""
        return self.kept.index(role * BUFFERS + quarter % BUFFERS)

    @gluon.jit
    def sums(self, role: gl.constexpr):
        """Where a role's two buffers are, sums [64, 64] in fp32."""
        return self.kept._reinterpret(gl.float32, [2, ROWS, QUARTER], _SUMS).index(role)


@gluon.constexpr_function
def is_transposed(shape):
    """Whether summands lie below each other in an operand of this shape, not side by side."""
    return shape[0] == STEP.value


@gluon.jit
def allocate(left, right, STAGES: gl.constexpr):
    """All shared memory, for the boxes of these tensor maps, with its barriers ready for use."""
    dtype: gl.constexpr = left.dtype
    storage = ProductStorage(
        left=allocate_operand(dtype, left.block_shape[0], left.block_shape[1], STAGES),
        right=allocate_operand(dtype, right.block_shape[0], right.block_shape[1], STAGES),
        kept=allocate_operand(dtype, ROWS, QUARTER, 2 * BUFFERS),
        ring=Ring(new_barriers(STAGES), new_barriers(STAGES, 2), STAGES),
    )
    fence_async_shared()
    return storage
