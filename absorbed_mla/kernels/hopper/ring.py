"""Rings of stages in shared memory, and the barriers by which roles hand them to each other.

As in CUTLASS's pipelines: a program's block of a number is in stage ``number % STAGES``. Its
producer acquires the stage when the consumers have released the block before it there; consumers
wait for what the producer has written, by a phase of a barrier, of which they know the parity.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from absorbed_mla.kernels.triton_private import aggregate


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Barriers that so many arrivals pass, of a thread or of the bytes that it announced.

    All must be used. The compiler gives the memory of one that is not to another buffer, without
    the mbarrier.inval that PTX requires before. On a GPU that other processes share, numbers in
    that buffer have then become the barrier's first state.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


@gluon.jit
def ring_position(number, STAGES: gl.constexpr):
    """Stage of a block, and the parity of the phase with which it is there."""
    return number % STAGES, number // STAGES & 1


@gluon.jit
def empty_position(number, STAGES: gl.constexpr):
    """Stage of a block, and the parity of the phase with which the block before it there left."""
    stage, parity = ring_position(number, STAGES)
    return stage, parity ^ 1


@gluon.jit
def wait_full(full, number, STAGES: gl.constexpr):
    """Wait until a block is there, by the barriers of its stages."""
    mbarrier.wait(full.index(number % STAGES), number // STAGES & 1)


@gluon.jit
def wait_empty(empty, number, STAGES: gl.constexpr):
    """Wait until the block before this one in its stage is released; none is before the first."""
    mbarrier.wait(empty.index(number % STAGES), (number // STAGES & 1) ^ 1)


@aggregate
class Ring:
    """The barriers of a ring.

    Attributes:
        full, empty: One for each stage.
        STAGES: How many there are.
    """

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def position(self, number):
        """Stage and parity of a block."""
        return ring_position(number, self.STAGES)

    @gluon.jit
    def acquire(self, number, NBYTES: gl.constexpr):
        """The barrier that so many bytes of a block will pass, when its stage is empty."""
        wait_empty(self.empty, number, self.STAGES)
        full = self.full.index(number % self.STAGES)
        mbarrier.expect(full, NBYTES)
        return full

    @gluon.jit
    def wait(self, number):
        """Wait until a block is there."""
        wait_full(self.full, number, self.STAGES)

    @gluon.jit
    def release(self, number):
        """A role does not need a block any more."""
        mbarrier.arrive(self.empty.index(number % self.STAGES))
