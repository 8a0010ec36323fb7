"""Blocks that requests can get: free ones, and cached ones that no request refers to.

Megatron evicts cached blocks where it allocates, but resumes requests by the number of free blocks
alone. Once blocks of ended requests fill the cache, it pauses and evicts requests for want of free
blocks, and raises an AssertionError when none is left that runs.
"""

from __future__ import annotations

import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
from torch import Tensor

from absorbed_mla.serving.megatron_engine.allocator import pool_of
from absorbed_mla.serving.megatron_engine.names import EVICT_CACHED, EVICT_PAUSED, RESUME

# Share of all blocks that is evicted together.
_EVICTED_TOGETHER = 1 / 64


def resume_with_cached_blocks(context: DynamicInferenceContext) -> None:
    """Let paused requests resume with blocks that are cached for ended ones.

    Replaces how ``context`` resumes requests, and evicts further ones where Megatron, which counts
    a block of several requests once for each of them, would leave none that can run.
    """
    evict = EVICT_PAUSED.of(context)

    def resume(active_count: int, paused_ids: Tensor | None) -> tuple[int, Tensor | None]:
        count = _resumable(context, active_count)
        if count:
            _resume_last(context, count)
            # They are the last ones that were paused.
            paused_ids = None if paused_ids is None else paused_ids[:-count]
        return active_count + count, paused_ids

    def evict_until_one_runs(active_count: int, *tokens: Tensor | None) -> Tensor | None:
        evicted = evict(active_count, *tokens)
        while evicted is not None and _stands_still(context, active_count):
            further = evict(active_count, *tokens)
            if further is None:
                break
            evicted = torch.cat((further, evicted))
        return evicted

    RESUME.replace(context, resume)
    EVICT_PAUSED.replace(context, evict_until_one_runs)


def evict_blocks_together(allocator: KVBlockAllocator) -> None:
    """Evict more cached blocks at once than an allocation lacks, the least recently used ones.

    Megatron goes over all cached blocks for each eviction, 60 ms for 32,768 of them on a CPU, and
    a full cache needs one for every block.
    """
    evict, together = EVICT_CACHED.of(allocator), int(pool_of(allocator)[0] * _EVICTED_TOGETHER)

    def evict_more(count: int) -> bool:
        cached = int(allocator.get_evictable_block_count())
        return count <= cached and evict(max(count, min(together, cached)))

    EVICT_CACHED.replace(allocator, evict_more)


def lacks_blocks(context: DynamicInferenceContext, active_count: int) -> bool:
    """Whether paused requests that have a row in a step with the active ones have no blocks."""
    wanted = min(context.paused_request_count, _free_rows(context, active_count))
    return _resumable(context, active_count) < wanted


def _stands_still(context: DynamicInferenceContext, active_count: int) -> bool:
    """Whether there are paused requests, and neither one of them nor another can decode."""
    # A prompt that is being read waits for all of its blocks.
    reading = context.get_index_of_chunked_prefill_request(safe=True) != -1
    decoding = active_count > reading
    return not decoding and context.paused_request_count and not _resumable(context, active_count)


def _resumable(context: DynamicInferenceContext, active_count: int) -> int:
    """How many of the paused requests, the last ones first, there are blocks for.

    Megatron's part for paused requests stays theirs: all others use ``active_count`` blocks of the
    allocator at most. In the tables, rows of paused requests come first, and those behind them.
    """
    paused = context.paused_request_count
    if not paused:
        return 0
    most = _free_rows(context, active_count)
    allocator, table = context.kv_block_allocator, context.request_to_kv_block_ids
    in_use = torch.zeros(pool_of(allocator)[0], dtype=torch.bool)
    active = table[paused : paused + active_count]
    in_use[active[active >= 0].long()] = True
    used, new, count = int(in_use.sum()), 0, 0
    needs_block = _need_block(context, slice(0, paused)).tolist()
    while count < min(most, paused):
        row = paused - 1 - count
        blocks = table[row, : context.request_kv_block_counts[row]].long()
        used += int((~in_use[blocks]).sum())
        in_use[blocks] = True
        new += needs_block[row]
        if used + new > allocator.active_count or not allocator.is_memory_available(new):
            break
        count += 1
    return count


def _free_rows(context: DynamicInferenceContext, active_count: int) -> int:
    """How many more requests a step may have."""
    tokens = context.num_speculative_tokens + 1
    return min(context.max_requests, context.max_tokens // tokens) - active_count


def _resume_last(context: DynamicInferenceContext, count: int) -> None:
    """Let the last ``count`` paused requests run, with another block where the last one is full."""
    end = context.paused_request_count
    context.paused_request_count = start = end - count
    rows = _need_block(context, slice(start, end)).nonzero().flatten() + start
    if not len(rows):
        return
    blocks = context.kv_block_allocator.allocate_memory_blocks(len(rows))
    assert blocks is not None, "they were counted"
    context.request_to_kv_block_ids[rows, context.request_kv_block_counts[rows].long()] = blocks
    context.request_kv_block_counts[rows] += 1
    context.request_last_kv_block_id[rows] = blocks


def _need_block(context: DynamicInferenceContext, rows: slice) -> Tensor:
    """By row, whether the tokens of the next step need another block, bool."""
    last = context.block_size_tokens - 1 - context.num_speculative_tokens
    return context.request_last_kv_block_offset[rows] >= last
