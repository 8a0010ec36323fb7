"""Scheduling by priority: which request begins first, and which one loses its blocks first."""

from __future__ import annotations

import bisect

import torch
from megatron.core.inference.engines import DynamicInferenceEngine
from torch import Tensor

from absorbed_mla.serving.megatron_engine.attributes import swap_rows
from absorbed_mla.serving.megatron_engine.names import (
    EVICT_PAUSED,
    PRIORITIES,
    RESUME,
    owners_of,
)
from absorbed_mla.serving.scheduler.free_blocks import lacks_blocks


class PriorityScheduling:
    """Keeps Megatron's waiting queue in the order of priorities, and evicts in the reverse one.

    Smaller numbers come earlier, of equal ones the request that came first. No running request is
    evicted for one that waits, only for one that runs and needs another block, as in vLLM; a prompt
    that is being read in chunks goes on.

    Args:
        engine: Whose context resumes paused requests with cached blocks (``free_blocks.py``).

    Raises:
        ValueError: If this Megatron has other private names.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        PRIORITIES.require(owners_of(engine))
        self._engine, self._context = engine, engine.context
        # Of the requests that were active when they were evicted, which Megatron still counts.
        self._evicted_active = 0
        self._is_sorted = True
        resume = RESUME.of(self._context)

        def resume_rest(active_count: int, paused_ids: Tensor | None) -> tuple[int, Tensor | None]:
            active_count, self._evicted_active = active_count - self._evicted_active, 0
            return resume(active_count, paused_ids)

        RESUME.replace(self._context, resume_rest)
        EVICT_PAUSED.replace(self._context, self._evict)

    def place_last(self) -> None:
        """Bring the request that was queued last to its place, unless Megatron has refused it."""
        waiting = self._engine.waiting_request_ids
        if waiting:
            bisect.insort(waiting, waiting.pop(), key=self._place)

    def sort(self, *, moved: bool = False) -> None:
        """Bring evicted requests, which are first now, to their places.

        Args:
            moved: Whether another than Megatron has put them there.
        """
        if moved or not self._is_sorted:
            waiting = self._engine.waiting_request_ids
            ordered = sorted(waiting, key=self._place)
            waiting.clear()
            waiting.extend(ordered)
            self._is_sorted = True

    def _place(self, number: int) -> tuple[bool, int, int]:
        """What requests are sorted by; one that is being read in chunks has to be the first."""
        reads = number == self._context.chunked_prefill_request_id
        return not reads, self._engine.requests[number].record.priority, number

    def _evict(self, active_count: int, *tokens: Tensor | None) -> Tensor | None:
        """Evict the last ones until paused requests can go on; see Megatron's function.

        Args:
            active_count: Rows that are not paused.
            tokens: By row; they are moved with the rows.

        Returns:
            Numbers of the requests.
        """
        context, evicted = self._context, []
        while lacks_blocks(context, active_count):
            numbers = context.request_ids[: context.total_request_count].tolist()
            last = max(numbers, key=self._place)
            if last == context.chunked_prefill_request_id:
                break
            row, end = numbers.index(last), context.total_request_count - 1
            context.release_memory_blocks_from_request_indexes(torch.tensor([row]))
            if row < context.paused_request_count:
                # The last of the paused rows becomes free, not one among them.
                context.paused_request_count -= 1
                swap_rows(context, row, context.paused_request_count, tokens)
                row = context.paused_request_count
            else:
                active_count -= 1
                self._evicted_active += 1
            swap_rows(context, row, end, tokens)
            context.total_request_count = end
            evicted.append(last)
        if not evicted:
            return None
        self._is_sorted = False
        return context.request_ids.new_tensor(evicted)
