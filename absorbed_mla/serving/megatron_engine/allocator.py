"""What the package does to Megatron's ``KVBlockAllocator`` beyond its documented calls."""

from __future__ import annotations

from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator


def pool_of(allocator: KVBlockAllocator) -> tuple[int, int]:
    """Number of blocks, the dummy one included, and of free ones."""
    if hasattr(allocator, "pool_size"):
        return allocator.pool_size, allocator.pool_avail
    return allocator.total_count, allocator.total_avail
