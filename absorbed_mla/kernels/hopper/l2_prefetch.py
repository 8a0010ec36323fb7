"""Prefetch of memory to the L2 cache."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _warp_layout(warps):
    """Of the numbers of a role's warps."""
    bits = [[1 << bit] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([], [[0]] * 5, bits, [], [warps])


@gluon.jit
def prefetch(words, size, WARPS: gl.constexpr):
    """Ask for bytes; each of the role's warps asks for its share.

    Args:
        words: Pointer to the first one, int32, a multiple of 16 bytes.
        size: A multiple of 16 times WARPS; 0 for none.
        WARPS: Of the role, a power of two.
    """
    share = size // WARPS
    layout: gl.constexpr = _warp_layout(WARPS)
    warp = gl.arange(0, WARPS, layout)
    # By an instruction that only one thread of a warp may run.
    gl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        elect.sync _|wanted, 0xffffffff;
        setp.ne.and.s32 wanted, $2, 0, wanted;
        @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [words + warp * (share // 4), share],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
