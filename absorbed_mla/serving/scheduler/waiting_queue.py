"""Requests that wait, and how many of them begin with a step that the decode loop prepares."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import islice, takewhile

from megatron.core.inference.engines import DynamicInferenceEngine

from absorbed_mla.serving.scheduler.conditions import may_admit

# Share of a step's tokens from which whole prompts fill it, so that no part of another is added: a
# step costs a few milliseconds beside its tokens, some 5 of 130 with 8,192 of them (H100).
_FILLED = 0.75
# Where more tokens wait than a step holds, it takes a quarter of them, but at least so many: all of
# them wait for its end, so that shorter steps bring first tokens sooner in the mean, as long as
# their tokens take far longer than the rest of a step (some 5 ms of 70 with 4,096; H100).
_OF_WAITING = 1 / 4
_AT_LEAST = 4096


class Admissions:
    """Lets Megatron's scheduler add requests to the loop's steps, each with its whole prompt.

    Steps that they leave rather empty, because the next one does not fit as a whole, are Megatron's
    own, which reads prompts in parts.

    Args:
        host: Megatron's engine.
        possible: Whether any can be added; if not, all are left to Megatron's own steps.
    """

    def __init__(self, host: DynamicInferenceEngine, *, possible: bool) -> None:
        self._host = host
        # Drawing reads the last logits of each request by its row.
        self._possible = possible and host.context.config.materialize_only_last_token_logits
        # The first request that waits, after the scheduler could not add it.
        self._refused: int | None = None

    def look_again(self) -> None:
        """Requests have ended: their rows and blocks may be what the next one has waited for."""
        self._refused = None

    def due(self, *, freely: bool) -> int | None:
        """How many of the requests that wait may begin with the next step, of known tokens.

        Args:
            freely: Whether a step may leave room that Megatron's would fill.

        Returns:
            A bound, 0 if none may; None if Megatron has to schedule them.
        """
        if self._none_may():
            return 0
        if not may_admit(self._host):
            self._refused = self._host.waiting_request_ids[0]
            return 0
        return self._leading(0, freely=freely) or None

    def due_ahead(self, ended: int, *, settled: bool) -> int | None:
        """As :meth:`due`, before the tokens of the step on the device are known.

        Args:
            ended: How many of its requests have no part in the next one.
            settled: Whether it is a decode step, so that the context says what is free.
        """
        if ended:
            self.look_again()
        if self._none_may():
            return 0
        context = self._host.context
        if context.total_request_count - ended == context.max_requests:
            return 0
        count = self._leading(ended, freely=True)
        if count or ended or not settled:
            return count or None
        return None if self.due(freely=True) != 0 else 0

    def admit(self, due: int) -> None:
        """Let the first ``due`` requests that wait begin, or as many as there are blocks for.

        Their rows are the context's last ones.
        """
        host, context = self._host, self._host.context
        if not due:
            return
        before = context.total_request_count
        # The scheduler sees no others, which it might read a part of.
        others = list(islice(host.waiting_request_ids, due, None))
        host.waiting_request_ids = deque(islice(host.waiting_request_ids, due))
        host.schedule_waiting_requests()
        host.waiting_request_ids.extend(others)
        assert context.chunked_prefill_request_id == -1, "every one fits as a whole"
        # It has left messages for those who wait for its own steps.
        host._run_coroutine_sync(asyncio.sleep(0))
        self._count_prefix_hits()
        if context.total_request_count == before:
            self._refused = host.waiting_request_ids[0]

    def _none_may(self) -> bool:
        waiting = self._host.waiting_request_ids
        return not waiting or waiting[0] == self._refused

    def _leading(self, ended: int, *, freely: bool) -> int:
        """How many of the first ones fit into a step as a whole; 0 if a part of another has to."""
        host, context = self._host, self._host.context
        if not self._possible or host._cg_admission_gating_active():
            return 0
        if not host.enable_chunked_prefill:
            return len(host.waiting_request_ids)
        running = context.total_request_count - ended
        room = context.max_tokens - running
        # One whose beginning another is about to read is passed over.
        most = (context.max_requests - running) * (4 if context.enable_prefix_caching else 1)
        shortens = freely and room > _AT_LEAST
        lengths = self._lengths(most, room / _OF_WAITING if shortens else room)
        total = sum(lengths)
        if total > room and not freely:
            return 0
        if shortens and total - self._cached(len(lengths)) > room:
            count = _filling(lengths, min(room, max(total * _OF_WAITING, _AT_LEAST)))
            if count:
                return count
        return _filling(lengths, room)

    def _lengths(self, most: int, tokens: float) -> list[int]:
        """Lengths of the first prompts that wait: of ``most``, or until they exceed ``tokens``."""
        found: list[int] = []
        for number in islice(self._host.waiting_request_ids, most):
            if tokens < 0:
                break
            found.append(len(self._host.get_request(number).remaining_prompt_tokens))
            tokens -= found[-1]
        return found

    def _cached(self, count: int) -> int:
        """How many tokens of the first prompts that wait the prefix cache has."""
        host, context = self._host, self._host.context
        if not context.enable_prefix_caching:
            return 0
        known = context.kv_block_allocator.kv_hash_to_block_id
        blocks = 0
        for number in islice(host.waiting_request_ids, count):
            hashes = host.get_request(number).precomputed_block_hashes or ()
            blocks += sum(1 for _ in takewhile(known.__contains__, hashes))
        return blocks * context.block_size_tokens

    def _count_prefix_hits(self) -> None:
        """Add the context's counters to the engine's, as Megatron does at the end of a step."""
        host, context = self._host, self._host.context
        if not context.enable_prefix_caching:
            return
        for ours, theirs in {
            "_prefix_cache_hits": "prefix_cache_hits",
            "_prefix_cache_blocks_matched": "prefix_cache_blocks_matched",
            "_prefill_tokens_computed": "prefix_cache_prefill_computed_tokens",
            "_prefill_tokens_skipped": "prefix_cache_prefill_skipped_tokens",
        }.items():
            setattr(host, ours, getattr(host, ours) + getattr(context, theirs))
            setattr(context, theirs, 0)


def _filling(lengths: Sequence[int], room: float) -> int:
    """How many of the first prompts fill a step as far as is worth it; 0 if none do."""
    tokens = 0
    for count, length in enumerate(lengths):
        if tokens + length > room:
            return count if tokens >= _FILLED * room else 0
        tokens += length
    return len(lengths)
