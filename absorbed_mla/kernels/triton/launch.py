"""Block sizes, warps and pipeline depth of the ``triton`` kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

# Assumed in the interpreter, which has no limit: it then runs the blocks of Hopper.
_HOPPER_SHARED_MEMORY = 232448


class Packing(NamedTuple):
    """How the rows of a block are made of heads and tokens.

    Attributes:
        heads: Heads in a block, HB.
        tokens: Tokens in a block.
    """

    heads: int
    tokens: int


def pack(num_heads: int, rows: int) -> Packing:
    """The packing of so many heads in blocks of ``rows``, a power of two."""
    heads = math.gcd(num_heads, rows)
    return Packing(heads, rows // heads)


class Blocks(NamedTuple):
    """Shape of a kernel's blocks.

    Attributes:
        rows: Query rows (heads of tokens) in a block.
        keys: Keys in a block.
        stages: Blocks of the inner loop in shared memory, loaded ahead or in use.
    """

    rows: int
    keys: int
    stages: int


class Launch(NamedTuple):
    """How the three kernels are launched, and with it which tiles they need.

    Attributes:
        forward: Of the output; as many rows as ``query``, so that they share their tiles.
        query: Of the gradient of the query.
        key: Of the gradient of the keys.
        warps: Of a block of any of them.
    """

    forward: Blocks
    query: Blocks
    key: Blocks
    warps: int

    def query_tokens(self, num_heads: int) -> int:
        """Tokens in a tile of queries."""
        return pack(num_heads, self.query.rows).tokens

    @property
    def key_tokens(self) -> int:
        """Tokens in a tile of keys."""
        return self.key.keys


# In order of speed on an H200 at C = 512, R = 64: forward 294 and 222 TFLOP/s for the first two,
# query 251 and 193 for the second and third; docs/kernels.md has all. fp32, for tests, is computed
# without tensor cores, one instruction after the other.
_QUERY_BLOCKS: dict[int, tuple[Blocks, ...]] = {
    2: (Blocks(64, 64, 2), Blocks(64, 64, 1), Blocks(64, 32, 1), Blocks(32, 32, 1)),
    4: (Blocks(16, 16, 1),),
}
_KEY_BLOCKS: dict[int, tuple[Blocks, ...]] = {
    2: (Blocks(32, 64, 2), Blocks(16, 64, 2), Blocks(32, 32, 1)),
    4: (),
}
_SMALLEST = Blocks(16, 16, 1)
_MOST_SPLITS = 16


@functools.lru_cache(maxsize=64)
def launch_for(dtype: torch.dtype, kv_lora_rank: int, rope: int, device: torch.device) -> Launch:
    """The largest blocks that fit into shared memory.

    Args:
        dtype: Of the operands.
        kv_lora_rank: C.
        rope: R.
        device: Where the kernels run.

    Raises:
        ValueError: If the smallest blocks do not fit.
    """
    size = dtype.itemsize
    limit, hopper = shared_memory(device)
    key_row = (kv_lora_rank + rope) * size
    # Other GPUs move results from registers through shared memory.
    result_row = 0 if hopper else kv_lora_rank * 4

    def query_bytes(blocks: Blocks, resident_row: int) -> int:
        streamed = blocks.stages * blocks.keys * key_row
        return blocks.rows * (resident_row + result_row) + streamed

    def key_bytes(blocks: Blocks) -> int:
        # A row of the output's gradient lies beside every row of the query.
        streamed = blocks.stages * 2 * blocks.rows * (key_row + 4)
        return blocks.keys * (key_row + result_row) + streamed

    def largest(candidates: tuple[Blocks, ...], needed: Callable[[Blocks], int]) -> Blocks:
        for blocks in (*candidates, _SMALLEST):
            if needed(blocks) <= limit:
                return blocks
        raise ValueError(f"a row of {kv_lora_rank} + {rope} {dtype} is too long for shared memory")

    query = largest(_QUERY_BLOCKS[size], lambda b: query_bytes(b, key_row + kv_lora_rank * size))
    same_rows = tuple(b for b in _QUERY_BLOCKS[size] if b.rows == query.rows)
    forward = largest(same_rows, lambda b: query_bytes(b, key_row))
    key = largest(_KEY_BLOCKS[size], key_bytes)
    return Launch(forward, query, key, warps=8 if size == 2 else 4)


def splits_for(tiles: int, batch: int, device: torch.device) -> int:
    """Number of splits of the queries of a tile of keys, a power of two.

    At least four blocks for every multiprocessor, since those at the diagonal have less work (on an
    H200, 8192 tokens: 1 split 98, 2 splits 195, 8 splits 219 TFLOP/s; 5 are slower than 4). Two in
    the interpreter, so that tests add up splits.
    """
    if device.type != "cuda":
        return 2
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    splits = -(-4 * processors // max(tiles * batch, 1))
    return min(1 << (splits - 1).bit_length(), _MOST_SPLITS)


def shared_memory(device: torch.device) -> tuple[int, bool]:
    """Bytes of a block, and whether matrix products read operands from shared memory (Hopper)."""
    if device.type != "cuda":
        return _HOPPER_SHARED_MEMORY, True
    properties = torch.cuda.get_device_properties(device)
    # PyTorch's stubs leave it out.
    limit = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return limit, properties.major == 9
