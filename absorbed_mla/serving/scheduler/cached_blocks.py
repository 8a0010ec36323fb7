"""Blocks of the prefix cache: each is found by its hash, behind the ones before it in the text."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import torch
from megatron.core.inference.config import PrefixCachingEvictionPolicy
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
)
from torch import Tensor

from absorbed_mla.megatron_names import ALLOCATOR
from absorbed_mla.serving.megatron_engine.names import (
    EVICTABLE,
    EVICTABLE_BLOCKS,
    FIND_CACHED,
    PARENTS,
    REGISTER,
    RELEASE,
    RELEASE_REQUESTS,
)
from absorbed_mla.serving.request_record import block_hashes


def correct_prefix_cache(context: DynamicInferenceContext) -> None:
    """Let every cached block be the only one of its hash, behind a cached block.

    Megatron's context looks for the last block of a prompt that is cached, and takes those before
    it for granted. They may be missing where two requests compute the same text: one that is read
    in chunks completes a block that another has cached meanwhile. Megatron registers it under the
    same hash; when one of the two is evicted, the hash goes, and what follows it stays.

    Here such a block is not registered, nor is one whose predecessor is not cached. A chunk behind
    it finds no cached blocks, whose predecessors its request would not hold. Nor are blocks counted
    as evictable while blocks behind them are in use.
    """
    allocator = context.kv_block_allocator
    if not allocator.enable_prefix_caching:
        return
    _register_chains(allocator)
    find = FIND_CACHED.of(context)

    def find_behind_cached(
        request: DynamicInferenceRequest, start: int, end: int
    ) -> tuple[list[int], int]:
        hashes = request.precomputed_block_hashes
        if 0 < start <= len(hashes):
            # The next chunk of a prompt takes the row behind all others.
            row = context.request_to_kv_block_ids[context.total_request_count]
            if allocator.kv_hash_to_block_id.get(hashes[start - 1]) != int(row[start - 1]):
                return [], 0
        return find(request, start, end)

    FIND_CACHED.replace(context, find_behind_cached)


def _register_chains(allocator: KVBlockAllocator) -> None:
    register = REGISTER.of(allocator)
    # Of Megatron 0.19 only.
    keeps_parents = "parent_hashes" in inspect.signature(register).parameters
    if not keeps_parents:
        _release_each(allocator)
    elif not EVICTABLE_BLOCKS.missing({ALLOCATOR: allocator}):  # blocks outlive their requests
        EVICTABLE.replace(allocator, lambda: _num_evictable(allocator))

    def register_chain(
        blocks: list[int], hashes: list[int], parents: Sequence[int] | None = None
    ) -> None:
        cached = allocator.kv_hash_to_block_id
        new: dict[int, int] = {}
        for i, one in enumerate(hashes):
            parent = parents[i] if parents else 0
            if one not in cached and (not parent or parent in cached or parent in new):
                new.setdefault(one, i)
        given = [blocks, hashes, parents] if keeps_parents and parents else [blocks, hashes]
        register(*([values[i] for i in new.values()] for values in given))

    REGISTER.replace(allocator, register_chain)


def _num_evictable(allocator: KVBlockAllocator) -> Tensor:
    """Number of cached blocks that no request uses, nor one behind them."""
    parents, is_used = PARENTS.of(allocator), allocator.block_ref_counts > 0
    is_cached = allocator.block_hashes != -1
    above = parents[is_used & is_cached]
    while (above := above[above >= 0]).numel():
        above = above[~is_used[above]].unique()
        is_used[above] = True
        above = parents[above]
    return (is_cached & ~is_used).sum()


def _release_each(allocator: KVBlockAllocator) -> None:
    """Let each request that ends take its reference from a shared block.

    Without parents, as on Megatron's branch dev, requests that end in one step take a single one.
    """
    release = RELEASE.of(allocator)

    def release_each(blocks: Tensor) -> None:
        while blocks.numel():
            blocks, counts = blocks.unique(return_counts=True)
            release(blocks)
            blocks = blocks.repeat_interleave(counts - 1)

    RELEASE.replace(allocator, release_each)


class GeneratedBlocks:
    """Puts generated tokens into Megatron's prefix cache, which itself has those of prompts only.

    It registers the full blocks of a request when it gives them back: it ends, or is evicted.

    Only tokens count that are final, and whose latents a step has written that is known not to have
    failed: all but the last one of which the request has been told by then. It may have one block
    less than it wrote, where that token or one of the step in flight fills it. So does one that is
    evicted, which would compute that block in any case: Megatron reads at least two tokens.

    Args:
        engine: With a prefix cache under the LRU policy, of a model without other states.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine, self._context = engine, engine.context
        # Those that have ended, but have a row in a step in flight.
        self._ended: dict[int, DynamicInferenceRequestRecord] = {}
        # Those without a token in their logits, whose latents nobody may find.
        self._failed: set[int] = set()
        release = RELEASE_REQUESTS.of(self._context)

        def register_and_release(rows: Tensor) -> None:
            for row in rows.tolist():
                self._register(row)
            release(rows)

        RELEASE_REQUESTS.replace(self._context, register_and_release)

    def keep(self, record: DynamicInferenceRequestRecord) -> None:
        """Megatron's engine forgets this request before its blocks are released."""
        self._ended[record.request_id] = record

    def fail(self, numbers: Iterable[int]) -> None:
        """These had no token in their logits; those that have given back their rows are skipped."""
        known = self._ended.keys() | self._engine.requests.keys()
        self._failed |= known & set(numbers)

    def forget_ended(self) -> None:
        """No request has a row any more."""
        self._ended.clear()
        self._failed.clear()

    def _register(self, row: int) -> None:
        number = int(self._context.request_ids[row])
        record = self._ended.pop(number, None)
        if record is None and number in self._engine.requests:
            record = self._engine.requests[number].record
        failed = number in self._failed
        self._failed.discard(number)
        if record is None or failed or not record[-1].generated_tokens:
            return
        request = record[-1]
        allocator, size = self._context.kv_block_allocator, self._context.block_size_tokens
        tokens = request.prompt_tokens.cpu()
        tokens = torch.cat((tokens, tokens.new_tensor(request.generated_tokens[:-1])))
        if len(tokens) // size == len(request.precomputed_block_hashes):
            return
        hashes = block_hashes(tokens, size, record.cache_salt)
        blocks = self._context.request_to_kv_block_ids[row, : len(hashes)].tolist()
        allocator.register_kv_block_hashes(blocks, hashes, [0, *hashes[:-1]])


def generated_blocks(engine: DynamicInferenceEngine) -> GeneratedBlocks | None:
    """None where blocks are not kept beyond their requests, or the model has other states."""
    context = engine.context
    if not context.enable_prefix_caching or context.is_hybrid_model:
        return None
    policy = context.kv_block_allocator.prefix_caching_eviction_policy
    return GeneratedBlocks(engine) if policy == PrefixCachingEvictionPolicy.LRU else None


def require_chains(allocator: KVBlockAllocator) -> None:
    """Check that each cached block is found by its hash, and the one before it is cached.

    Raises:
        RuntimeError: Naming the blocks of which that is not true.
    """
    hashes = allocator.block_hashes
    found = torch.full_like(hashes, -1)
    for one, block in allocator.kv_hash_to_block_id.items():
        found[block] = one
    lost = found != hashes
    if not EVICTABLE_BLOCKS.missing({ALLOCATOR: allocator}):
        parents = PARENTS.of(allocator)
        lost |= (parents >= 0) & (hashes[parents] == -1)
    if lost.any():
        raise RuntimeError(
            f"blocks {lost.nonzero().flatten().tolist()} of the prefix cache are lost"
        )
