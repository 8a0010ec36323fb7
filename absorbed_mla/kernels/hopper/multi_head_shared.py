"""Shared memory of the multi-head forward, and the barriers that say what is in it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from absorbed_mla.kernels.hopper.multi_head_tile import BLOCK, ROWS
from absorbed_mla.kernels.hopper.ring import Ring, new_barriers
from absorbed_mla.kernels.triton_private import aggregate

# Blocks in shared memory.
STAGES = gl.constexpr(2)


@aggregate
class MultiHeadStorage:
    """Buffers, and barriers that multi_head_kernel.py describes.

    Attributes:
        q_content, q_rope: Of the halves, [2, 64, 1, 1, D] and [2, 64, 1, 1, R].
        k_content, k_rope: Of the stages, [2, 128, 1, 1, D] and [2, 128, 1, 1, R].
        value: Likewise, [2, 128, 1, 1, V].
        upcoming: The work that follows a work of the program, int32 [2, 1], by turns.
        q_full, q_empty: A barrier for each half.
        key_ring, value_ring: Of the stages, which both attend roles release.
        landed: One barrier.
        CONTENT: D, width of the part of query and key before the rope part.
        R: Width of the rope part.
        V: Width of values.
        DTYPE: Of queries, keys and values.
    """

    q_content: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor
    k_content: gl.shared_memory_descriptor
    k_rope: gl.shared_memory_descriptor
    value: gl.shared_memory_descriptor
    upcoming: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    key_ring: Ring
    value_ring: Ring
    landed: gl.shared_memory_descriptor
    CONTENT: gl.constexpr
    R: gl.constexpr
    V: gl.constexpr
    DTYPE: gl.constexpr

    @gluon.jit
    def contents(self, HALF: gl.constexpr, stage):
        """Queries [64, D] of a half and keys [128, D] of a stage."""
        queries = self.q_content.index(HALF).reshape([ROWS, self.CONTENT])
        return queries, self.k_content.index(stage).reshape([BLOCK, self.CONTENT])

    @gluon.jit
    def ropes(self, HALF: gl.constexpr, stage):
        """Their rope parts, [64, R] and [128, R]."""
        queries = self.q_rope.index(HALF).reshape([ROWS, self.R])
        return queries, self.k_rope.index(stage).reshape([BLOCK, self.R])

    @gluon.jit
    def values(self, stage):
        """Values [128, V] of a stage."""
        return self.value.index(stage).reshape([BLOCK, self.V])

    @gluon.jit
    def tell(self, number, upcoming):
        """Write which work follows the program's work of a number."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.upcoming.index(number & 1).store(gl.full([1], upcoming, gl.int32, layout))

    @gluon.jit
    def told(self, number):
        """Read it."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.sum(self.upcoming.index(number & 1).load(layout), axis=0)


@gluon.jit
def allocate(q_content, q_rope, k_content, k_rope, value):
    """All shared memory, for the boxes of these tensor maps."""
    dtype: gl.constexpr = q_content.dtype
    # By name: Triton 3.6 takes a layout for a constant only if it is declared one.
    Q_CONTENT: gl.constexpr = q_content.layout
    Q_ROPE: gl.constexpr = q_rope.layout
    K_CONTENT: gl.constexpr = k_content.layout
    K_ROPE: gl.constexpr = k_rope.layout
    VALUE: gl.constexpr = value.layout
    CONTENT: gl.constexpr = q_content.block_shape[3]
    R: gl.constexpr = q_rope.block_shape[3]
    V: gl.constexpr = value.block_shape[3]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_content = gl.allocate_shared_memory(dtype, [2, ROWS, 1, 1, CONTENT], Q_CONTENT)
    q_rope = gl.allocate_shared_memory(dtype, [2, ROWS, 1, 1, R], Q_ROPE)
    k_content = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, 1, 1, CONTENT], K_CONTENT)
    k_rope = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, 1, 1, R], K_ROPE)
    value = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, 1, 1, V], VALUE)
    upcoming = gl.allocate_shared_memory(gl.int32, [2, 1], plain)
    q_full, q_empty = new_barriers(2), new_barriers(2)
    k_full, v_full = new_barriers(STAGES), new_barriers(STAGES)
    k_empty, v_empty = new_barriers(STAGES, 2), new_barriers(STAGES, 2)
    storage = MultiHeadStorage(
        q_content=q_content,
        q_rope=q_rope,
        k_content=k_content,
        k_rope=k_rope,
        value=value,
        upcoming=upcoming,
        q_full=q_full,
        q_empty=q_empty,
        key_ring=Ring(k_full, k_empty, STAGES),
        value_ring=Ring(v_full, v_empty, STAGES),
        landed=new_barriers(1),
        CONTENT=CONTENT,
        R=R,
        V=V,
        DTYPE=dtype,
    )
    fence_async_shared()
    return storage
