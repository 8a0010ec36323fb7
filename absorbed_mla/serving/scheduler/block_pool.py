"""KV blocks of the latent cache: bytes per block, fixes of Megatron's bookkeeping, leak check."""

from __future__ import annotations

from typing import Any

from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.dsa.indexer import Indexer
from absorbed_mla.inference.context_config import context_config
from absorbed_mla.serving.megatron_engine.allocator import pool_of
from absorbed_mla.serving.megatron_engine.names import UPDATE_REQUESTS
from absorbed_mla.serving.scheduler.cached_blocks import require_chains

# Tokens of a block. FlashMLA's size, which Megatron requires of a cache of latents.
BLOCK_SIZE = 64


def block_bytes(config: MLATransformerConfig, num_layers: int) -> int:
    """Bytes of the latents of one block, over ``num_layers`` layers, which Megatron counts.

    Args:
        config: That of the context; see :func:`cache_config`.
        num_layers: Layers of this rank.
    """
    width = config.kv_lora_rank + config.qk_pos_emb_head_dim
    return num_layers * BLOCK_SIZE * width * config.params_dtype.itemsize


def all_block_bytes(model: GPTModel) -> int:
    """Bytes that one block takes in all of this rank's layers, index keys included."""
    config, num_indexers = model.config, len(indexers(model))
    width = (config.dsa_indexer_head_dim or 0) if num_indexers else 0
    index_keys = num_indexers * BLOCK_SIZE * width * config.params_dtype.itemsize
    return block_bytes(cache_config(model), len(model.decoder.layers)) + index_keys


def cache_config(model: GPTModel) -> MLATransformerConfig:
    """The config that the model's context is made from.

    Raises:
        ValueError: If its layers cache latents in several dtypes.
    """
    options = {one.options.latent_cache_dtype: one.options for one in attentions(model)}
    if len(options) > 1:
        raise ValueError(
            "latent_cache_dtype must be the same in all layers of a model that generates, got "
            f"{', '.join(sorted(options))}"
        )
    return context_config(model.config, *options.values()) if options else model.config


def attentions(model: GPTModel) -> list[AbsorbedMLASelfAttention]:
    """The attention of each of this rank's layers that has ours."""
    layers = (getattr(layer, "self_attention", None) for layer in model.decoder.layers)
    return [one for one in layers if isinstance(one, AbsorbedMLASelfAttention)]


def indexers(model: GPTModel) -> list[Indexer]:
    """Of this rank's layers with sparse attention that do not share a selection."""
    return [module for module in model.decoder.modules() if isinstance(module, Indexer)]


def place_drafts(context: DynamicInferenceContext) -> None:
    """Let every token of a step with drafts be written to the block that its request's table names.

    Where a step begins in one block and ends in the next, Megatron's context looks up the first one
    in a list by rows that it made before it evicted requests, which gives rows to other requests.
    Such tokens would be written to a block of another request, or to a free one.
    """
    if not context.num_speculative_tokens:
        return
    update = UPDATE_REQUESTS.of(context)

    def update_and_place(*args: Any, **kwargs: Any) -> dict | None:
        done = update(*args, **kwargs)
        step = slice(0, context.active_token_count)
        rows = context.token_to_request_idx[step].long()
        columns = context.token_to_pos_ids[step].long() // context.block_size_tokens
        # All of them are on the host.
        context.token_to_block_idx[step] = context.request_to_kv_block_ids[rows, columns]
        return done

    UPDATE_REQUESTS.replace(context, update_and_place)


def require_no_leak(context: DynamicInferenceContext) -> None:
    """Check the block allocator of a context without requests.

    Every block must be free, or be in the prefix cache without a reference to it, where its hash
    finds it behind a cached one.

    Raises:
        RuntimeError: Naming the blocks that are not.
    """
    allocator = context.kv_block_allocator
    count, available = pool_of(allocator)
    free = allocator.block_bag[:available].tolist()
    usable = set(range(count)) - {allocator.dummy_block_idx}
    cached: set[int] = set()
    if allocator.enable_prefix_caching:
        cached = set(allocator.kv_hash_to_block_id.values())
        used = allocator.block_ref_counts.nonzero().flatten().tolist()
        if used:
            raise RuntimeError(f"blocks {used} are referred to, but there is no request")
        require_chains(allocator)
    if len(set(free)) != len(free) or set(free) & cached or (set(free) | cached) != usable:
        raise RuntimeError(
            f"of blocks 0 to {count - 2}, {sorted(free)} are free and "
            f"{sorted(cached)} in the prefix cache"
        )
