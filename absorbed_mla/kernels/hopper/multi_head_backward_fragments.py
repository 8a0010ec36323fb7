"""dQ of multi-head attention in the order of fragments; see backward_fragments.py.

Here the two warpgroups' groups of 8 columns alternate: a thread's place among the others is then
its number, for accumulators of any width, and takes one register.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.hopper.backward_fragments import reduce_groups

# Bytes of a warpgroup's group of 8 columns, and of both warpgroups'.
_WARPGROUP = gl.constexpr(4 * 8 * 4 * 16)
_GROUP = gl.constexpr(2 * 4 * 8 * 4 * 16)


@gluon.jit
def add_fragments(part, target):
    """Add an accumulator [64, W] of two warpgroups to W * 64 numbers at ``target``."""
    reduce_groups(part, target, _WARPGROUP, _GROUP)
