"""The requests of the overlap scheduler: those that wait, and those that run."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice, takewhile

import torch
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    Status,
)
from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams

from absorbed_mla.serving.megatron_engine.attributes import (
    PREFIX_COUNTERS,
    admits_by_cuda_graph,
    can_schedule_chunk,
    can_schedule_prompt,
    check_stop_words,
    queue_request,
    run_coroutine,
)
from absorbed_mla.serving.request_record import RequestRecord, block_hashes
from absorbed_mla.serving.request_results import Progress, progress_of
from absorbed_mla.serving.sampling.sampler import RequestSampler, SampledRequest

# Share of a step's tokens from which whole prompts fill it, so that no part of another is added: a
# step costs a few milliseconds beside its tokens, some 5 of 130 with 8,192 of them (H100).
_FILLED = 0.75
# Where more tokens wait than a step holds, it takes a quarter of them, but at least so many: all of
# them wait for its end, so that shorter steps bring first tokens sooner in the mean, as long as
# their tokens take far longer than the rest of a step (some 5 ms of 70 with 4,096; H100).
_OF_WAITING = 1 / 4
_AT_LEAST = 4096


class WaitingQueue:
    """Megatron's queue of waiting requests, which are admitted to steps with their whole prompts.

    Steps that they leave rather empty, because the next one does not fit as a whole, are Megatron's
    own, with chunked prefill.

    Args:
        admits: Whether any can be admitted; if not, all are left to Megatron's own steps.
    """

    def __init__(self, engine: DynamicInferenceEngine, *, admits: bool) -> None:
        self._engine = engine
        # Sampling reads the last logits of each request by its row.
        self._admits = admits and engine.context.config.materialize_only_last_token_logits
        # The first request that waits, after Megatron's scheduler could not add it.
        self._refused: int | None = None

    def retry(self) -> None:
        """Requests have finished: their rows and blocks may be what the next one has waited for."""
        self._refused = None

    def admissible(self, *, freely: bool) -> int | None:
        """How many of the requests that wait may begin with the next step, of known tokens.

        Args:
            freely: Whether a step may leave room that Megatron's would fill.

        Returns:
            A bound, 0 if none may; None if Megatron has to schedule them.
        """
        if self._none_may():
            return 0
        if not self._megatron_admits():
            self._refused = self._engine.waiting_request_ids[0]
            return 0
        return self._fitting(0, freely=freely) or None

    def admissible_ahead(self, finished: int, *, is_decode: bool) -> int | None:
        """As :meth:`admissible`, before the tokens of the step in flight are known.

        Args:
            finished: How many of its requests have no part in the next one.
            is_decode: Whether it is a decode step, so that the context says what is free.
        """
        if finished:
            self.retry()
        if self._none_may():
            return 0
        context = self._engine.context
        if context.total_request_count - finished == context.max_requests:
            return 0
        count = self._fitting(finished, freely=True)
        if count or finished or not is_decode:
            return count or None
        return None if self.admissible(freely=True) != 0 else 0

    def admit(self, count: int) -> None:
        """Let the first ``count`` requests that wait begin, or as many as there are blocks for.

        Their rows are the context's last ones.
        """
        engine, context = self._engine, self._engine.context
        if not count:
            return
        before = context.total_request_count
        # Megatron's scheduler sees no others, which it might compute a part of.
        others = list(islice(engine.waiting_request_ids, count, None))
        engine.waiting_request_ids = deque(islice(engine.waiting_request_ids, count))
        engine.schedule_waiting_requests()
        engine.waiting_request_ids.extend(others)
        assert context.chunked_prefill_request_id == -1, "every one fits as a whole"
        # It has left messages for those who wait for its own steps.
        run_coroutine(engine)(asyncio.sleep(0))
        self._count_prefix_hits()
        if context.total_request_count == before:
            self._refused = engine.waiting_request_ids[0]

    def _none_may(self) -> bool:
        waiting = self._engine.waiting_request_ids
        return not waiting or waiting[0] == self._refused

    def _megatron_admits(self) -> bool:
        """Whether Megatron's scheduler may add the first request that waits to the next step.

        If not, it looks at no other. That stays so until a running request finishes, since nothing
        else gives back blocks or rows.
        """
        engine = self._engine
        request = engine.get_request(engine.waiting_request_ids[0])
        if engine.enable_chunked_prefill:
            return can_schedule_chunk(engine)(request)
        return can_schedule_prompt(engine)(request, record_cg_wait=False)

    def _fitting(self, finished: int, *, freely: bool) -> int:
        """How many of the first ones fit into a step as a whole; 0 if a part of another has to."""
        engine, context = self._engine, self._engine.context
        if not self._admits or admits_by_cuda_graph(engine)():
            return 0
        if not engine.enable_chunked_prefill:
            return len(engine.waiting_request_ids)
        running = context.total_request_count - finished
        room = context.max_tokens - running
        # One whose beginning another is about to compute is passed over.
        most = (context.max_requests - running) * (4 if context.enable_prefix_caching else 1)
        shortens = freely and room > _AT_LEAST
        lengths = self._lengths(most, room / _OF_WAITING if shortens else room)
        total = sum(lengths)
        if total > room and not freely:
            return 0
        if shortens and total - self._cached(len(lengths)) > room:
            count = _worthwhile(lengths, min(room, max(total * _OF_WAITING, _AT_LEAST)))
            if count:
                return count
        return _worthwhile(lengths, room)

    def _lengths(self, most: int, tokens: float) -> list[int]:
        """Lengths of the first prompts that wait: of ``most``, or until they exceed ``tokens``."""
        found: list[int] = []
        for number in islice(self._engine.waiting_request_ids, most):
            if tokens < 0:
                break
            found.append(len(self._engine.get_request(number).remaining_prompt_tokens))
            tokens -= found[-1]
        return found

    def _cached(self, count: int) -> int:
        """How many tokens of the first prompts that wait the prefix cache has."""
        engine, context = self._engine, self._engine.context
        if not context.enable_prefix_caching:
            return 0
        known = context.kv_block_allocator.kv_hash_to_block_id
        blocks = 0
        for number in islice(engine.waiting_request_ids, count):
            hashes = engine.get_request(number).precomputed_block_hashes or ()
            blocks += sum(1 for _ in takewhile(known.__contains__, hashes))
        return blocks * context.block_size_tokens

    def _count_prefix_hits(self) -> None:
        """Add the context's counters to the engine's, as Megatron does at the end of a step."""
        engine, context = self._engine, self._engine.context
        if not context.enable_prefix_caching:
            return
        for total, counter in PREFIX_COUNTERS.items():
            setattr(engine, total, getattr(engine, total) + getattr(context, counter))
            setattr(context, counter, 0)


def enqueue(
    engine: DynamicInferenceEngine,
    number: int,
    prompt: Sequence[int],
    sampling: MegatronSamplingParams,
    cache_salt: str | None = None,
    priority: int = 0,
) -> None:
    """Add a request to Megatron's waiting queue, as its ``add_request`` does.

    That puts the prompt on the device, from where its scheduler reads it again: both wait for the
    step that runs there.
    """
    context = engine.context
    size = context.block_size_tokens
    # In a third of the time of torch.tensor: 0.4 ms less for 8,192 tokens.
    tokens = torch.frombuffer(array("q", prompt), dtype=torch.int64)
    request = DynamicInferenceRequest(
        request_id=number,
        prompt_tokens=tokens,
        block_size_tokens=size,
        enable_prefix_caching=context.enable_prefix_caching,
        # Without a salt it computes them.
        precomputed_block_hashes=block_hashes(tokens, size, cache_salt) if cache_salt else [],
    )
    # It belongs to this request alone. Given above, Megatron would copy it, deeply and slowly.
    request.sampling_params = sampling
    queue_request(engine)(request)
    entry = engine.requests.get(number)
    if entry is not None:
        entry.record = RequestRecord.from_request(request)
        entry.record.cache_salt, entry.record.priority = cache_salt, priority
        if not sampling.skip_prompt_log_probs:
            # Blocks found in the prefix cache have no logits.
            entry.record[-1].precomputed_block_hashes = []


def evict_all(engine: DynamicInferenceEngine) -> list[int]:
    """Put all requests that run in front of those that wait, to be computed again from the start.

    Their blocks are still the context's, which is to be reset.

    Returns:
        Their numbers.
    """
    waiting = engine.waiting_request_ids
    running = sorted(engine.requests.keys() - set(waiting))
    for number in running:
        engine.requests[number].record.checkpoint()
        engine.get_request(number).add_event_evict()
    # One that waits may be read in chunks.
    for number in waiting:
        request = engine.get_request(number)
        request.remaining_prompt_tokens = request.prompt_tokens
        request.finished_chunk_token_count = 0
    waiting.extendleft(reversed(running))
    engine.evicted_request_count += len(running)
    return running


class RunningRequests:
    """The requests of the input batch: Megatron's records of them, which get their tokens.

    It does to the records what Megatron does in a step that pauses and evicts no request. The
    engine's sampler gets the tokens, too.

    Attributes:
        numbers: Of the requests, by row of the last step that was prepared.
    """

    def __init__(self, engine: DynamicInferenceEngine, sampler: RequestSampler) -> None:
        self._engine, self._sampler = engine, sampler
        self.numbers: list[int] = []
        # In the order of their numbers, in which progress is reported.
        self._records: dict[int, DynamicInferenceRequestRecord] = {}
        self._parts: dict[int, DynamicInferenceRequest] = {}
        self._sampled: dict[int, SampledRequest] = {}
        # Where their tokens are kept, which is for as long as they run.
        self._tokens: dict[int, tuple[list[int], list[int]]] = {}
        self._with_stop_words: set[int] = set()
        # Those that have no token yet.
        self._without: set[int] = set()
        # A step without log-probabilities reports the last ones that a request has.
        self._scored: set[int] = set()
        self._ranked: set[int] = set()

    def set_rows(self, numbers: Sequence[int]) -> None:
        """Have these requests in the rows of the next step; some may be new."""
        self.numbers = list(numbers)
        new = [number for number in numbers if number not in self._records]
        for number in new:
            record = self._engine.requests[number].record
            part, sampled = record[-1], self._sampler.requests[number]
            self._records[number], self._parts[number] = record, part
            self._sampled[number] = sampled
            self._tokens[number] = part.generated_tokens, sampled.generated
            if part.stop_word_ids or sampled.grammar is not None:
                self._with_stop_words.add(number)
            if not part.generated_tokens:
                self._without.add(number)
            if any(one.generated_log_probs for one in record.requests):
                self._scored.add(number)
            if any(one.generated_top_n_logprobs for one in record.requests):
                self._ranked.add(number)
        if new:
            self._records = dict(sorted(self._records.items()))

    def reorder(self, order: Sequence[int]) -> None:
        """Rows are others; ``order`` has, for each of them, the row that it was."""
        self.numbers = [self.numbers[row] for row in order]

    def sampled(self) -> list[SampledRequest]:
        """What the sampler knows of the requests, by row."""
        return [self._sampled[number] for number in self.numbers]

    def append_tokens(
        self,
        numbers: Sequence[int],
        tokens: Sequence[int],
        log_probs: Sequence[float] | None,
        *,
        without: Collection[int],
    ) -> list[Progress]:
        """Add a step's tokens to the requests of all rows but some.

        Returns:
            Their progress by ascending numbers.
        """
        if without:
            rows = [row for row in range(len(numbers)) if row not in without]
            numbers, tokens = ([each[row] for row in rows] for each in (numbers, tokens))
            log_probs = None if log_probs is None else [log_probs[row] for row in rows]
        for number, token in zip(numbers, tokens):
            ours, theirs = self._tokens[number]
            ours.append(token)
            theirs.append(token)
        if self._without:
            for number in self._without.intersection(numbers):
                _time_first_token(self._parts[number])
            self._without.difference_update(numbers)
        if log_probs is not None:
            for number, value in zip(numbers, log_probs):
                _add_log_prob(self._parts[number], value)
        if self._with_stop_words:
            for number in self._with_stop_words.intersection(numbers):
                self._look_for_stop_words(number)
        found = dict(zip(numbers, tokens))
        ascending = [number for number in self._records if number in found]
        if self._ranked or (self._scored and log_probs is None):
            return [progress_of(self._records[number], number, 1, None) for number in ascending]
        if log_probs is None:
            return [Progress(number, [found[number]]) for number in ascending]
        scored = dict(zip(numbers, log_probs))
        return [Progress(number, [found[number]], [scored[number]]) for number in ascending]

    def finish(
        self, number: int, token: int | None, log_prob: float | None
    ) -> DynamicInferenceRequestRecord:
        """Finish a request; returns Megatron's record.

        The sampler does not get the token, by which the engine knows that it is new.

        Args:
            token: The last one; None: it finishes without.
            log_prob: Of the token, if it was asked for.
        """
        engine, record, part = self._engine, self._records.pop(number), self._parts.pop(number)
        if token is not None:
            part.generated_tokens.append(token)
            if number in self._without:
                _time_first_token(part)
            if log_prob is not None:
                _add_log_prob(part, log_prob)
        engine.stop_word_finished_request_ids.discard(number)
        engine.finished_request_count += 1
        part.generated_length = len(part.generated_tokens)
        part.status = Status.COMPLETED
        part.add_event_finish()
        engine.requests.pop(number).future.set_result(record)
        for held in (self._with_stop_words, self._without, self._scored, self._ranked):
            held.discard(number)
        del self._sampled[number], self._tokens[number]
        return record

    def _look_for_stop_words(self, number: int) -> None:
        """Let a request finish with the next step, as Megatron does, after a stop word."""
        found, _ = check_stop_words(self._engine)(self._parts[number])
        if found:
            self._engine.stop_word_finished_request_ids.add(number)


def _worthwhile(lengths: Sequence[int], room: float) -> int:
    """How many of the first prompts fill a step as far as is worth it; 0 if none do."""
    tokens = 0
    for count, length in enumerate(lengths):
        if tokens + length > room:
            return count if tokens >= _FILLED * room else 0
        tokens += length
    return len(lengths)


def _time_first_token(part: DynamicInferenceRequest) -> None:
    """Record how long a request has waited for its first token."""
    kind = DynamicInferenceEventType.GENERATED_TOKEN
    event = DynamicInferenceEvent(type=kind, payload={"token_id": part.generated_tokens[0]})
    part.ttft = event.timestamp - part.event_add_engine.timestamp


def _add_log_prob(part: DynamicInferenceRequest, log_prob: float) -> None:
    """As Megatron adds it to a request whose prompt has none."""
    part.prompt_log_probs = part.prompt_log_probs or []
    part.generated_log_probs = part.generated_log_probs or []
    part.generated_log_probs.append(log_prob)
