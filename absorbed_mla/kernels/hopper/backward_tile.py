"""What a program of the backward kernel works on: its tile, its shared memory, copies to it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Gluon has no public name for it in Triton 3.6 and 3.7; its own examples import it like this.
from triton.language.core import _aggregate as aggregate

ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
# All threads of the program; Triton 3.7 renamed it.
synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.constexpr_function
def accumulator_layout(columns):
    """Of [64, columns] in fp32: each of two warpgroups has half of the columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, columns // 2, 16])


@gluon.constexpr_function
def shared_layout(columns, rank=2):
    """Of rows of 16-bit operands."""
    return gl.NVMMASharedLayout(min(2 * columns, 128), 16, rank)


@gluon.constexpr_function
def row_layout(columns):
    """Of [64, columns] where a thread has 16 contiguous bytes of a row."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [8, 1], [1, 0])


@aggregate
class Tile:
    """Which rows and keys a program works on; see ``query_tiles`` in tiles.py.

    Attributes:
        query_start, query_end: Its tokens; the last tile of a sequence has fewer than the rest.
        key_start, key_end: Keys that any of them sees.
        offset: Query i of the tile sees keys key_start .. key_start + i + offset.
        batch: Entry of the batch.
        head: First head.
        HEADS: Heads per token. Row r is token r // HEADS and head r % HEADS.
    """

    query_start: gl.tensor
    query_end: gl.tensor
    key_start: gl.tensor
    key_end: gl.tensor
    offset: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    HEADS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, query_start, query_end, key_start, key_end, offset, batch, head, HEADS):
        self.query_start = query_start
        self.query_end = query_end
        self.key_start = key_start
        self.key_end = key_end
        self.offset = offset
        self.batch = batch
        self.head = head
        self.HEADS = gl.constexpr(HEADS)

    @gluon.jit
    def rows(self, batches, heads, layout: gl.constexpr):
        """Where the rows are in [S_q, B, N], int64 [64], and which of them are in the tile."""
        row = gl.arange(0, ROWS, layout)
        query = self.query_start + row // self.HEADS
        index = (query.to(gl.int64) * batches + self.batch) * heads + self.head + row % self.HEADS
        return index, query < self.query_end

    @gluon.jit
    def hides(self, first):
        """Whether any row does not see all of the block of keys at ``first``."""
        last = first + KEYS - 1
        past_diagonal = last - self.key_start > self.offset
        return (first < self.key_start) | (last >= self.key_end) | past_diagonal

    @gluon.jit
    def sees(self, first, layout: gl.constexpr):
        """Which row sees which key of the block, [64, 64]."""
        key = first - self.key_start + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
        token = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) // self.HEADS
        inside = (key >= 0) & (key < self.key_end - self.key_start)
        return inside.expand_dims(0) & (key.expand_dims(0) <= (token + self.offset).expand_dims(1))


@gluon.jit
def read_tile(tiles, batches, heads, HEADS: gl.constexpr):
    """The program's tile: heads vary fastest, so that neighbours read the same keys."""
    groups = heads // HEADS
    program = gl.program_id(0)
    row = tiles + program // (groups * batches) * 5
    return Tile(
        gl.load(row),
        gl.load(row + 1),
        gl.load(row + 2),
        gl.load(row + 3),
        gl.load(row + 4),
        program // groups % batches,
        program % groups * HEADS,
        HEADS,
    )


@aggregate
class Shared:
    """Operands in shared memory, each [1, 64, its columns], and the barriers of their arrival.

    Attributes:
        q_content, q_rope, grad_out: Rows of the tile.
        latent, k_rope: A block of keys.
        probs: P, [rows, keys].
        grad_scores: dS times the scale of the scores, [rows, keys].
        rows_full: All rows are there.
        keys_full: The block of keys is there.
    """

    q_content: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor
    grad_out: gl.shared_memory_descriptor
    latent: gl.shared_memory_descriptor
    k_rope: gl.shared_memory_descriptor
    probs: gl.shared_memory_descriptor
    grad_scores: gl.shared_memory_descriptor
    rows_full: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, operands, rows_full, keys_full):
        (
            self.q_content,
            self.q_rope,
            self.grad_out,
            self.latent,
            self.k_rope,
            self.probs,
            self.grad_scores,
        ) = operands
        self.rows_full = rows_full
        self.keys_full = keys_full


@gluon.jit
def _operand(dtype: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.allocate_shared_memory(dtype, [1, 64, COLUMNS], shared_layout(COLUMNS))


@gluon.jit
def allocate(dtype: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr):
    """Shared memory with its barriers ready for use."""
    operands = (
        _operand(dtype, LATENT),
        _operand(dtype, ROPE),
        _operand(dtype, LATENT),
        _operand(dtype, LATENT),
        _operand(dtype, ROPE),
        _operand(dtype, KEYS),
        _operand(dtype, KEYS),
    )
    rows_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(rows_full, count=1)
    mbarrier.init(keys_full, count=1)
    fence_async_shared()
    synchronize()
    return Shared(operands, rows_full, keys_full)


@gluon.jit
def at_step(operand, i, PHASE: gl.constexpr):
    """An operand, [64, its columns], as step ``PHASE`` of block ``i`` finds it.

    The index is always 0. Were it a constant, the compiler would compute the descriptors of all
    products, more than a hundred, before the loop, keep them in registers, and spill.
    """
    return operand.index(i >> (30 - PHASE))


@gluon.jit
def load_rows(q_content, q_rope, grad_out, shared, tile):
    """Begin to copy what the tile's rows have, whether or not all 64 are in it."""
    bytes: gl.constexpr = (
        q_content.block_type.nbytes + q_rope.block_type.nbytes + grad_out.block_type.nbytes
    )
    mbarrier.expect(shared.rows_full, bytes)
    at = [tile.query_start, tile.batch, tile.head, 0]
    _copy(q_content, at, shared.rows_full, shared.q_content)
    _copy(q_rope, at, shared.rows_full, shared.q_rope)
    _copy(grad_out, at, shared.rows_full, shared.grad_out)


@gluon.jit
def load_keys(latent, k_rope, shared, tile, first):
    """Begin to copy the block of keys at ``first``."""
    bytes: gl.constexpr = latent.block_type.nbytes + k_rope.block_type.nbytes
    mbarrier.expect(shared.keys_full, bytes)
    at = [first, tile.batch, 0]
    _copy(latent, at, shared.keys_full, shared.latent)
    _copy(k_rope, at, shared.keys_full, shared.k_rope)


@gluon.jit
def _copy(source, at, barrier, operand):
    """Begin to copy a block of a tensor map to an operand of as many elements."""
    target = operand._reinterpret(operand.dtype, source.block_shape, source.layout)
    tma.async_copy_global_to_shared(source, at, barrier, target)


@gluon.jit
def clear_outside(operand, first, end):
    """Zero rows before ``first`` and from ``end`` on: they are of others, and may hold anything."""
    W: gl.constexpr = operand.shape[2]
    STEP: gl.constexpr = W if W < 64 else 64
    layout: gl.constexpr = row_layout(STEP)
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    inside = ((row >= first) & (row < end)).expand_dims(1)
    zero = gl.full([64, STEP], 0, operand.dtype, layout)
    for column in gl.static_range(0, W, STEP):
        part = operand.index(0).slice(column, STEP, dim=1)
        part.store(gl.where(inside, part.load(layout), zero))


@gluon.jit
def finish_clearing():
    """Let the tensor cores see what was cleared."""
    fence_async_shared()
    synchronize()
