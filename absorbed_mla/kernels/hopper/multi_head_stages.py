"""When a stage of keys or values is no longer needed, by mbarriers or by the hardware's barriers.

An arrival at an mbarrier is one thread's, for which a role's threads wait for each other. At a
barrier of the hardware each warp arrives for itself, and none waits but the load role.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from absorbed_mla.kernels.hopper.multi_head_shared import STAGES

# Numbers of the first of two barriers each; Triton takes the first ones.
KEYS_EMPTY = gl.constexpr(8)
VALUES_EMPTY = gl.constexpr(10)
# Both attend roles' threads and the load role's.
_ARRIVE = gl.constexpr("bar.arrive $1, 288; mov.u32 $0, 0;")
_AWAIT = gl.constexpr("bar.sync $1, 288; mov.u32 $0, 0;")


@gluon.jit
def release(empty, FIRST: gl.constexpr, index, NAMED: gl.constexpr):
    """Say that the role is done with the program's block of an index."""
    if NAMED:
        _named(_ARRIVE, FIRST + index % STAGES)
    else:
        mbarrier.arrive(empty.index(index % STAGES))


@gluon.jit
def await_empty(empty, FIRST: gl.constexpr, index, NAMED: gl.constexpr):
    """Wait until a block may be loaded: for the block that had its stage before."""
    if NAMED:
        if index >= STAGES:
            _named(_AWAIT, FIRST + index % STAGES)
    else:
        mbarrier.wait(empty.index(index % STAGES), (index // STAGES & 1) ^ 1)


@gluon.jit
def drain_empty(FIRST: gl.constexpr, blocks, NAMED: gl.constexpr):
    """Leave no arrivals at the end."""
    if NAMED:
        for index in range(gl.maximum(blocks - STAGES, 0), blocks):
            _named(_AWAIT, FIRST + index % STAGES)


@gluon.jit
def _named(ASSEMBLY: gl.constexpr, number):
    gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)
