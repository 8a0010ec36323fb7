"""Statistics of an engine's steps: counters of its own, and those of Megatron's engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron.core.inference.engines import DynamicInferenceEngine

from absorbed_mla.serving.megatron_engine.allocator import pool_of
from absorbed_mla.serving.megatron_engine.attributes import (
    prefill_tokens,
    prefix_blocks_matched,
    tokens_accepted,
    tokens_drafted,
)
from absorbed_mla.serving.prefix_cache.stored import StoredPrefixes


@dataclass
class Statistics:
    """Counters of an engine's steps.

    Attributes:
        steps: Forward passes.
        graph_steps: Forward passes padded to the size of a CUDA graph.
        mixed_steps: Forward passes that decode some requests and prefill others.
        most_rows: Maximum number of requests in a forward pass.
        most_paused: Maximum number of requests that kept their blocks while they waited.
        evicted: How often a request lost its blocks, to be prefilled again later.
        prefix_blocks: Blocks that the prefix cache had already.
        disk_blocks: Of these, blocks that were read from ``prefix_cache_dir``.
        prefix_queries: Tokens that were looked for in the prefix cache, also again after a request
            has lost its blocks.
        prefix_hits: Of these, tokens that were there, and not computed.
        streamed_blocks: Blocks of host memory that steps have read, each time for all layers.
        chunks: Forward passes that ended in the middle of a prompt.
        drafts: How often MTP layers proposed tokens for a request.
        drafted: Tokens that they proposed.
        accepted: Of these, tokens that were generated.
        running, waiting: Requests, now.
        blocks, used_blocks: Of the cache, and those of requests, now.
    """

    steps: int = 0
    graph_steps: int = 0
    mixed_steps: int = 0
    most_rows: int = 0
    most_paused: int = 0
    evicted: int = 0
    prefix_blocks: int = 0
    disk_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    streamed_blocks: int = 0
    chunks: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    running: int = 0
    waiting: int = 0
    blocks: int = 0
    used_blocks: int = 0

    @property
    def cache_usage(self) -> float:
        """Share of the cache's blocks that requests use."""
        return self.used_blocks / max(1, self.blocks)

    @classmethod
    def of_engines(cls, each: Sequence[Statistics]) -> Statistics:
        """Of several engines together: sums, and the largest maximum of any of them."""
        total = cls()
        for field_ in fields(cls):
            values = [getattr(one, field_.name) for one in each]
            largest = field_.name.startswith("most_")
            setattr(total, field_.name, max(values) if largest else sum(values))
        return total


class MegatronCounters:
    """What Megatron's engine has counted since :meth:`begin`.

    Args:
        stored: Prefixes on disk, if there are any.
        drafts: Whether MTP layers propose tokens.
    """

    def __init__(
        self, host: DynamicInferenceEngine, stored: StoredPrefixes | None, *, drafts: bool
    ) -> None:
        self._host, self._stored, self._drafts = host, stored, drafts
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._before = self._totals()

    def write_to(self, statistics: Statistics) -> None:
        """Bring the fields that Megatron counts up to date."""
        for name, total in self._totals().items():
            setattr(statistics, name, total - self._before[name])
        context, allocator = self._host.context, self._host.context.kv_block_allocator
        count, free = pool_of(allocator)
        if allocator.enable_prefix_caching:
            free += int(allocator.get_evictable_block_count())
        paused = context.paused_request_count
        statistics.running = context.total_request_count - paused
        statistics.waiting = len(self._host.waiting_request_ids) + paused
        # The dummy one is nobody's.
        statistics.blocks, statistics.used_blocks = count - 1, max(0, count - 1 - free)

    def _totals(self) -> dict[str, int]:
        """By field of :class:`Statistics`, since Megatron's engine was reset."""
        host = self._host
        computed, found = prefill_tokens(host)
        totals = {
            "prefix_queries": computed + found,
            "prefix_hits": found,
            "evicted": host.evicted_request_count,
            "prefix_blocks": prefix_blocks_matched(host),
            "disk_blocks": 0 if self._stored is None else self._stored.blocks_read,
        }
        if self._drafts:
            drafted = tokens_drafted(host)
            totals["drafts"], totals["drafted"] = int(drafted[0]), int(drafted.sum())
            totals["accepted"] = int(tokens_accepted(host).sum())
        return totals
