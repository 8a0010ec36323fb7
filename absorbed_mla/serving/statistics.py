"""Statistics of an engine's steps, and what counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine

from absorbed_mla.inference.kv_offload.context import OffloadingContext
from absorbed_mla.serving.prefix_cache.stored import StoredPrefixes
from absorbed_mla.serving.scheduler.in_flight_step import Flight


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
        streamed_blocks: Blocks of host memory that steps have read, each time for all layers.
        chunks: Forward passes that ended in the middle of a prompt.
        drafted: Tokens that MTP layers proposed.
        accepted: Of these, tokens that were generated.
    """

    steps: int = 0
    graph_steps: int = 0
    mixed_steps: int = 0
    most_rows: int = 0
    most_paused: int = 0
    evicted: int = 0
    prefix_blocks: int = 0
    disk_blocks: int = 0
    streamed_blocks: int = 0
    chunks: int = 0
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of_engines(cls, each: Sequence[Statistics]) -> Statistics:
        """Of several engines together: sums, and the largest maximum of any of them."""
        total = cls()
        for field_ in fields(cls):
            values = [getattr(one, field_.name) for one in each]
            largest = field_.name.startswith("most_")
            setattr(total, field_.name, max(values) if largest else sum(values))
        return total

    def count_step(
        self, context: DynamicInferenceContext, rows: InferenceBatchDimensions, *, padded: bool
    ) -> None:
        """Count a forward pass.

        Args:
            context: Of the engine.
            rows: Numbers of its requests.
            padded: Whether it had the size of a CUDA graph.
        """
        self.steps += 1
        self.graph_steps += padded
        self.mixed_steps += rows.decode_req_count > 0 and rows.prefill_req_count > 0
        self.most_rows = max(self.most_rows, rows.req_count)
        self.most_paused = max(self.most_paused, context.paused_request_count)
        if isinstance(context, OffloadingContext):
            self.streamed_blocks += context.tiers.num_streamed
        self.chunks += context.chunked_prefill_request_id >= 0


class StepCounter:
    """Counts the steps of an engine, and what Megatron has counted since :meth:`begin`.

    Args:
        host: Megatron's engine.
        stored: Prefixes on disk, if there are any.
        drafts: Whether MTP layers propose tokens.
    """

    def __init__(
        self, host: DynamicInferenceEngine, stored: StoredPrefixes | None, *, drafts: bool
    ) -> None:
        self._host, self._stored, self._drafts = host, stored, drafts
        self.begin()

    def begin(self) -> Statistics:
        """Begin anew; returns statistics that the next steps bring up to date."""
        self._before = self._totals()
        self._statistics = Statistics()
        return self._statistics

    def count(self, flight: Flight | None) -> None:
        """Count a forward pass.

        Args:
            flight: The step, if the decode loop ran it.
        """
        context, found = self._host.context, self._statistics
        if flight is None:
            padded = context.using_cuda_graph_this_step()
            found.count_step(context, context.batch_dimensions, padded=padded)
        else:
            found.count_step(context, flight.sizes, padded=flight.padded)
        for name, total in self._totals().items():
            setattr(found, name, total - self._before[name])

    def _totals(self) -> dict[str, int]:
        """By field of :class:`Statistics`, since Megatron's engine was reset."""
        host = self._host
        totals = {
            "evicted": host.evicted_request_count,
            "prefix_blocks": host._prefix_cache_blocks_matched,
            "disk_blocks": 0 if self._stored is None else self._stored.blocks_read,
        }
        if self._drafts:
            totals["drafted"] = int(host._spec_tokens_proposed_per_pos.sum())
            totals["accepted"] = int(host._spec_tokens_accepted_per_pos.sum())
        return totals
