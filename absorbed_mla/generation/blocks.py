"""Blocks of the paged latent cache: their size, and a check that none was lost."""

from __future__ import annotations

from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.transformer.transformer_config import MLATransformerConfig

# Tokens of a block. FlashMLA's size, which Megatron requires of a cache of latents.
BLOCK_SIZE = 64


def block_bytes(config: MLATransformerConfig, num_layers: int) -> int:
    """Bytes that one block takes, over ``num_layers`` layers."""
    width = config.kv_lora_rank + config.qk_pos_emb_head_dim
    return num_layers * BLOCK_SIZE * width * config.params_dtype.itemsize


def require_no_leak(context: DynamicInferenceContext) -> None:
    """Check the block allocator of a context without requests.

    Every block must be free, or be in the prefix cache without a reference to it.

    Raises:
        RuntimeError: Naming the blocks that are not.
    """
    allocator = context.kv_block_allocator
    free = allocator.block_bag[: allocator.total_avail].tolist()
    usable = set(range(allocator.total_count)) - {allocator.dummy_block_idx}
    cached: set[int] = set()
    if allocator.enable_prefix_caching:
        cached = set(allocator.kv_hash_to_block_id.values())
        used = allocator.block_ref_counts.nonzero().flatten().tolist()
        if used:
            raise RuntimeError(f"blocks {used} are referred to, but there is no request")
    if len(set(free)) != len(free) or set(free) & cached or (set(free) | cached) != usable:
        raise RuntimeError(
            f"of blocks 0 to {allocator.total_count - 2}, {sorted(free)} are free and "
            f"{sorted(cached)} in the prefix cache"
        )
