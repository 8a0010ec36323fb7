"""Shared memory of the decode kernel for few rows, and the barriers that say what is in it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from absorbed_mla.kernels import fp8_latents
from absorbed_mla.kernels.hopper.forward_shared import STAGES
from absorbed_mla.kernels.hopper.layouts import operand_layout
from absorbed_mla.kernels.hopper.ring import Ring, new_barriers
from absorbed_mla.kernels.hopper.tile import KEYS
from absorbed_mla.kernels.triton_private import aggregate

# Roles that decode pieces, by turns.
DECODE_ROLES = gl.constexpr(2)
# Columns with one scale: of a piece of a block.
GROUP = gl.constexpr(fp8_latents.GROUP)
# Blocks whose scales are there. Those of a block take the place of scales that no piece in the ring
# needs any more: a ring is shorter than two blocks.
SCALES = gl.constexpr(3)


@aggregate
class FewRowsStorage:
    """Buffers, and barriers that few_rows_kernel.py describes.

    Attributes:
        q_content: [tokens, 1, HEADS, C], or with the first two axes exchanged.
        q_rope: Likewise, of R.
        latents: Decoded blocks, [2, 64, C].
        k_rope: [2, 64, 1, R].
        probs: P of a block, [64, ROWS].
        pieces: 128 columns each of blocks, in FP8, four in a word, [PIECES, 64, 1, 32] int32.
        scales: Fp32 [3, 64, 1, C / 128].
        q_full, q_empty: One barrier.
        piece_full: One for each turn of the ring and the roles that decode: a barrier is waited for
            by one role, in every phase. Copies may end in any order, and parity does not tell a
            phase from the one before last; a role that had skipped a phase, as it was for the other
            role, could go on before that was over.
        scale_full: One for each of ``scales``.
        latents_full: One for each stage and 128 columns.
        latents_empty: One for each stage.
        rope_ring: Of k_rope's stages.
        C: ``kv_lora_rank``.
        R: Width of k_rope.
        ROWS: Of a tile.
        PIECES: Places of the ring.
        TURNS: Pieces from one to the next that has its place and its role.
    """

    q_content: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor
    latents: gl.shared_memory_descriptor
    k_rope: gl.shared_memory_descriptor
    probs: gl.shared_memory_descriptor
    pieces: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    piece_full: gl.shared_memory_descriptor
    scale_full: gl.shared_memory_descriptor
    latents_full: gl.shared_memory_descriptor
    latents_empty: gl.shared_memory_descriptor
    rope_ring: Ring
    C: gl.constexpr
    R: gl.constexpr
    ROWS: gl.constexpr
    PIECES: gl.constexpr
    TURNS: gl.constexpr


@gluon.jit
def allocate_few_rows(
    q_content,
    q_rope,
    values,
    scales,
    k_rope,
    C: gl.constexpr,
    R: gl.constexpr,
    ROWS: gl.constexpr,
    PIECES: gl.constexpr,
):
    """All shared memory, for the boxes of these tensor maps; see ``attend_few_rows``."""
    # By name, as in forward_shared.py.
    VALUES_LAYOUT: gl.constexpr = values.layout
    SCALES_LAYOUT: gl.constexpr = scales.layout
    ROPE_LAYOUT: gl.constexpr = k_rope.layout
    dtype: gl.constexpr = q_content.dtype
    GROUPS: gl.constexpr = C // GROUP
    storage = FewRowsStorage(
        q_content=gl.allocate_shared_memory(dtype, q_content.block_shape, q_content.layout),
        q_rope=gl.allocate_shared_memory(dtype, q_rope.block_shape, q_rope.layout),
        latents=gl.allocate_shared_memory(dtype, [STAGES, KEYS, C], operand_layout(C)),
        k_rope=gl.allocate_shared_memory(dtype, [STAGES, KEYS, 1, R], ROPE_LAYOUT),
        probs=gl.allocate_shared_memory(dtype, [KEYS, ROWS], operand_layout(ROWS)),
        pieces=gl.allocate_shared_memory(
            values.dtype, [PIECES, KEYS, 1, GROUP // 4], VALUES_LAYOUT
        ),
        scales=gl.allocate_shared_memory(scales.dtype, [SCALES, KEYS, 1, GROUPS], SCALES_LAYOUT),
        q_full=new_barriers(1),
        q_empty=new_barriers(1),
        piece_full=new_barriers(PIECES * DECODE_ROLES),
        scale_full=new_barriers(SCALES),
        latents_full=new_barriers(STAGES * GROUPS),
        latents_empty=new_barriers(STAGES),
        rope_ring=Ring(new_barriers(STAGES), new_barriers(STAGES), STAGES),
        C=C,
        R=R,
        ROWS=ROWS,
        PIECES=PIECES,
        TURNS=PIECES * DECODE_ROLES,
    )
    fence_async_shared()
    return storage
