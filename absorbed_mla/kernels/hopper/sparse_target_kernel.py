"""The KL target kernel: probabilities of chosen keys, summed over the heads of a query.

One program has one token and up to 128 of its heads, and goes through the token's keys, 64 at a
time. A block is gathered once and used by one product for each head, so what the gather takes from
the L2 cache decides how fast all can be: heads share it as far as they go. The queries are in
registers, 144 of each thread at C = 512, so that shared memory holds three blocks of keys and the
products read from it nothing but keys. The warps have three roles:

* ``_load_role``, four warps: copies rows by ``cp.async``, as in sparse_forward_kernel.py, but asks
  for a block before it waits for the one before.
* ``_first_role`` and ``_second_role``, four warps each: scores S = Q K^T, P = exp2(S - LSE), and
  the sums over their 64 rows. Of more than 64 heads each has a half and goes through all keys;
  else both have all heads, and each a half of every block's keys. One computes P while the
  products of the other run: the second begins when the first product of the first is done, and
  stays behind.

Barriers, see forward_kernel.py: ``q_full`` (once), ``full`` and ``empty`` (per block; both roles
arrive at ``empty``), ``begun`` (once, the first role's first product is done). The queries land in
the last stages, so their first ``empty`` says that the queries have been read.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from absorbed_mla.kernels.hopper.forward_scores import count_blocks
from absorbed_mla.kernels.hopper.forward_shared import announce
from absorbed_mla.kernels.hopper.layouts import (
    SWIZZLED,
    accumulator_layout,
    operand_layout,
    row_layout,
)
from absorbed_mla.kernels.hopper.ring import Ring, new_barriers
from absorbed_mla.kernels.hopper.sparse_forward_kernel import LOAD_WARPS, gather_columns
from absorbed_mla.kernels.hopper.sparse_tile import key_of, read_sparse_tile
from absorbed_mla.kernels.hopper.synchronize import synchronize
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS
from absorbed_mla.kernels.triton_private import aggregate

LOG2_E = gl.constexpr(math.log2(math.e))
# Blocks of keys in shared memory.
_STAGES = gl.constexpr(3)
# Registers of each thread of a role, of 504; the first role gets what the others leave: 224.
_SUM_REGISTERS = gl.constexpr(224)
_LOAD_REGISTERS = gl.constexpr(56)


@aggregate
class _TargetStorage:
    """Buffers, and barriers as above.

    Attributes:
        content: Latents, [3, 64, C].
        rope: k_rope, [3, 64, R].
        q_full, begun: One barrier.
        ring: Of the stages.
        GROUPS: Of 64 heads.
    """

    content: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    begun: gl.shared_memory_descriptor
    ring: Ring
    GROUPS: gl.constexpr


@gluon.jit
def _allocate(dtype: gl.constexpr, C: gl.constexpr, R: gl.constexpr, GROUPS: gl.constexpr):
    """All shared memory."""
    content = gl.allocate_shared_memory(dtype, [_STAGES, KEYS, C], operand_layout(C))
    rope = gl.allocate_shared_memory(dtype, [_STAGES, KEYS, R], operand_layout(R))
    ring = Ring(new_barriers(_STAGES), new_barriers(_STAGES, 2), _STAGES)
    shared = _TargetStorage(content, rope, new_barriers(1), new_barriers(1), ring, GROUPS)
    fence_async_shared()
    return shared


@gluon.jit
def _load_role(tile, shared, q_content, q_rope, latent, k_rope, strides):
    """Load the queries, then each block as soon as both roles are done with its stage."""
    C: gl.constexpr = shared.content.shape[2]
    R: gl.constexpr = shared.rope.shape[2]
    layout: gl.constexpr = row_layout(SWIZZLED, LOAD_WARPS)
    _load_queries(tile, shared, q_content, q_rope)
    latent_s, latent_b, rope_s, rope_b = strides
    latent += tile.batch.to(gl.int64) * latent_b
    k_rope += tile.batch.to(gl.int64) * rope_b
    listed = tile.listed(0, gl.SliceLayout(1, layout))
    blocks = count_blocks(tile)
    for block in range(blocks):
        stage = block % _STAGES
        key, there = key_of(listed, tile)
        # The phase before this block's; the stages where queries land have one more.
        queries_landed = (stage + shared.GROUPS) // _STAGES
        parity = (block // _STAGES + queries_landed & 1) ^ 1
        mbarrier.wait(shared.ring.empty.index(stage), parity)
        content, rope = shared.content.index(stage), shared.rope.index(stage)
        gather_columns(content, 0, C, latent, (key * latent_s)[:, None], there)
        gather_columns(rope, 0, R, k_rope, (key * rope_s)[:, None], there)
        listed = tile.listed(block + 1, gl.SliceLayout(1, layout))
        if block > 0:
            async_copy.wait_group(2)  # those of this block
            announce(shared.ring.full.index((block - 1) % _STAGES))
    async_copy.wait_group(0)
    announce(shared.ring.full.index((blocks - 1) % _STAGES))


@gluon.jit
def _load_queries(tile, shared, q_content, q_rope):
    """Load each group's queries to a stage, the last group's to the last."""
    GROUPS: gl.constexpr = shared.GROUPS
    # By name, as in forward_shared.py.
    CONTENT_LAYOUT: gl.constexpr = q_content.layout
    ROPE_LAYOUT: gl.constexpr = q_rope.layout
    full = shared.q_full.index(0)
    mbarrier.expect(full, GROUPS * (q_content.block_type.nbytes + q_rope.block_type.nbytes))
    for group in gl.static_range(GROUPS):
        stage = _STAGES - GROUPS + group
        position = [tile.query_start, tile.batch, tile.head * GROUPS + group * ROWS, 0]
        content = shared.content.index(stage)._reinterpret(
            q_content.dtype, q_content.block_shape, CONTENT_LAYOUT
        )
        rope = shared.rope.index(stage)._reinterpret(q_rope.dtype, q_rope.block_shape, ROPE_LAYOUT)
        tma.async_copy_global_to_shared(q_content, position, full, content)
        tma.async_copy_global_to_shared(q_rope, position, full, rope)


@gluon.jit
def _first_role(tile, shared, lse, out, shape, scale):
    _sum_role(tile, shared, lse, out, shape, scale, 0)


@gluon.jit
def _second_role(tile, shared, lse, out, shape, scale):
    _sum_role(tile, shared, lse, out, shape, scale, 1)


@gluon.jit
def _sum_role(tile, shared, lse, out, shape, scale, NUMBER: gl.constexpr):
    """Sum the probabilities of 64 rows: of all keys, or of a half of each block."""
    length, queries, batches, heads = shape
    GROUPS: gl.constexpr = shared.GROUPS
    GROUP: gl.constexpr = NUMBER if GROUPS == 2 else 0
    COLUMNS: gl.constexpr = KEYS if GROUPS == 2 else KEYS // 2
    FIRST: gl.constexpr = 0 if GROUPS == 2 else NUMBER * COLUMNS
    layout: gl.constexpr = accumulator_layout(COLUMNS, 1)
    group = tile.head // ROWS * GROUPS + GROUP
    row_lse = _read_lse(lse + tile.number.to(gl.int64) * heads, group, heads, layout)
    query = (group.to(gl.int64) * batches + tile.batch) * queries + tile.query_start
    out += query * length
    keys: gl.constexpr = gl.SliceLayout(0, _column_layout())
    place = FIRST + gl.arange(0, COLUMNS, keys)
    q_content, q_rope = _read_queries(shared, _STAGES - GROUPS + GROUP, layout)
    blocks = count_blocks(tile)
    if NUMBER == 1:
        mbarrier.wait(shared.begun.index(0), 0)
    for block in range(blocks):
        stage = block % _STAGES
        entry = gl.load(tile.entries + place, mask=place < tile.keys, other=-1)
        content = shared.content.index(stage).slice(FIRST, COLUMNS, dim=0)
        rope = shared.rope.index(stage).slice(FIRST, COLUMNS, dim=0)
        s = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        shared.ring.wait(block)
        s = warpgroup_mma(q_content, content.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_rope, rope.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        shared.ring.release(block)
        if (block == 0) & (NUMBER == 0):
            mbarrier.arrive(shared.begun.index(0))
        total = _sum_rows(gl.exp2(s * scale - row_lse[:, None]))
        gl.store(out + place, gl.where(entry >= 0, total, 0.0), mask=place < length)
        place += KEYS
    nothing = gl.zeros([COLUMNS], gl.float32, keys)
    for _ in range(blocks, (length + KEYS - 1) // KEYS):
        gl.store(out + place, nothing, mask=place < length)
        place += KEYS


@gluon.constexpr_function
def _column_layout():
    """Of [4, keys]: a thread has a key."""
    return gl.BlockedLayout([4, 1], [1, 32], [1, 4], [1, 0])


@gluon.jit
def _sum_rows(p):
    """Sums of the columns of an accumulator: of each warp's 16 rows, then of the four warps'."""
    COLUMNS: gl.constexpr = p.shape[1]
    warps = gl.sum(p.reshape([4, ROWS // 4, COLUMNS]), axis=1)
    return gl.sum(gl.convert_layout(warps, _column_layout()), axis=0)


@gluon.jit
def _read_lse(lse, group, heads, layout: gl.constexpr):
    """To base 2, [64]; inf, hence no probability, where it is -inf or there is no head."""
    head = group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    value = gl.load(lse + head, mask=head < heads, other=-float("inf"))
    return gl.where(value == -float("inf"), float("inf"), value * LOG2_E)


@gluon.jit
def _read_queries(shared, stage, layout: gl.constexpr):
    """A group's queries, [64, C] and [64, R], as the left operand of products."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    mbarrier.wait(shared.q_full.index(0), 0)
    content = shared.content.index(stage).load(operand)
    rope = shared.rope.index(stage).load(operand)
    synchronize()
    for group in gl.static_range(shared.GROUPS):
        mbarrier.arrive(shared.ring.empty.index(_STAGES - shared.GROUPS + group))
    return content, rope


@gluon.jit(do_not_specialize=["length", "queries", "batches", "heads"])
def sum_sparse_probabilities(
    q_content,
    q_rope,
    latent,
    k_rope,
    latent_s,
    latent_b,
    rope_s,
    rope_b,
    entries,
    counts,
    open_counts,
    lse,
    out,
    length,
    queries,
    batches,
    heads,
    scale,
    GROUPS: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
):
    """Sums of every token; one program for each token, entry of the batch and 64 * GROUPS heads.

    Args:
        q_content: Tensor map of [S_q, B, N, C] in boxes [1, 1, 64, C].
        q_rope: Of [S_q, B, N, R] in boxes [1, 1, 64, R].
        latent: [S_k, B, C]; rows begin at multiples of 16 bytes.
        k_rope: [S_k, B, R], likewise.
        latent_s: Stride of a key, like the next three a multiple of 16.
        latent_b: Of an entry of the batch.
        rope_s: Stride of a key in k_rope.
        rope_b: Of an entry of the batch.
        entries: int32 [S_q, B, L], see key_lists.py; contiguous like all that follows.
        counts: int32 [S_q, B].
        open_counts: int32 [S_q, B].
        lse: fp32 [S_q, B, N].
        out: fp32 [groups of 64 heads, B, S_q, L], the groups a multiple of GROUPS; written.
        length: L.
        queries: S_q.
        batches: B.
        heads: N.
        scale: Of the scores, times log2(e).
        GROUPS: Of 64 heads in a program, 1 or 2.
        C: ``kv_lora_rank``.
        R: Width of k_rope.
    """
    lists = entries, counts, open_counts
    # As if a program had 64 heads: those of its first group.
    programs = (heads + GROUPS - 1) // GROUPS
    tile = read_sparse_tile(lists, 0, length, queries, batches, programs, ROWS)
    shared = _allocate(q_content.dtype, C, R, GROUPS)
    strides = latent_s, latent_b, rope_s, rope_b
    shape = length, queries, batches, heads
    gl.warp_specialize(
        [
            (_first_role, (tile, shared, lse, out, shape, scale)),
            (_second_role, (tile, shared, lse, out, shape, scale)),
            (_load_role, (tile, shared, q_content, q_rope, latent, k_rope, strides)),
        ],
        [4, LOAD_WARPS],  # warps of the roles but the first, which has the launch's four
        [_SUM_REGISTERS, _LOAD_REGISTERS],
    )
