"""The running requests of decode steps: Megatron's records, which get their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    Status,
)

from absorbed_mla.serving.request_results import Progress, progress_of
from absorbed_mla.serving.sampling.sampler import RequestSampler, SampledRequest


class Members:
    """Does to the records of requests what Megatron does in a step that pauses and evicts none.

    Args:
        host: Megatron's engine.
        sampler: Of the engine; it gets the tokens, too.

    Attributes:
        numbers: Of the requests, by row of the last step that was prepared.
    """

    def __init__(self, host: DynamicInferenceEngine, sampler: RequestSampler) -> None:
        self._host, self._sampler = host, sampler
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

    def join(self, numbers: Sequence[int]) -> None:
        """Have these requests in the rows of the next step; some may be new."""
        self.numbers = list(numbers)
        new = [number for number in numbers if number not in self._records]
        for number in new:
            record = self._host.requests[number].record
            part, sampled = record[-1], self._sampler.request(number)
            self._records[number], self._parts[number] = record, part
            self._sampled[number] = sampled
            self._tokens[number] = part.generated_tokens, sampled.generated
            if part.stop_word_ids:
                self._with_stop_words.add(number)
            if not part.generated_tokens:
                self._without.add(number)
            if any(one.generated_log_probs for one in record.requests):
                self._scored.add(number)
            if any(one.generated_top_n_logprobs for one in record.requests):
                self._ranked.add(number)
        if new:
            self._records = dict(sorted(self._records.items()))

    def move(self, order: Sequence[int]) -> None:
        """Rows are others; ``order`` has, for each of them, the row that it was."""
        self.numbers = [self.numbers[row] for row in order]

    def sampled(self) -> list[SampledRequest]:
        """What the sampler knows of the requests, by row."""
        return [self._sampled[number] for number in self.numbers]

    def append(
        self,
        numbers: Sequence[int],
        tokens: Sequence[int],
        log_probs: Sequence[float] | None,
    ) -> list[Progress]:
        """Add a token to each of some requests; returns their progress by ascending numbers."""
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

    def end(
        self, number: int, token: int | None, log_prob: float | None
    ) -> DynamicInferenceRequestRecord:
        """End a request; returns Megatron's record.

        The sampler does not get the token, by which the engine knows that it is new.

        Args:
            number: Of the request.
            token: The last one; None: it was told to end without.
            log_prob: Of the token, if it was asked for.
        """
        host, record, part = self._host, self._records.pop(number), self._parts.pop(number)
        if token is not None:
            part.generated_tokens.append(token)
            if number in self._without:
                _time_first_token(part)
            if log_prob is not None:
                _add_log_prob(part, log_prob)
        host.stop_word_finished_request_ids.discard(number)
        host.finished_request_count += 1
        part.generated_length = len(part.generated_tokens)
        part.status = Status.COMPLETED
        part.add_event_finish()
        host.requests.pop(number).future.set_result(record)
        for held in (self._with_stop_words, self._without, self._scored, self._ranked):
            held.discard(number)
        del self._sampled[number], self._tokens[number]
        return record

    def _look_for_stop_words(self, number: int) -> None:
        """Let a request end with the next step, as Megatron does, after one of its stop words."""
        found, _ = self._host._check_stop_words_for_request_post_append(self._parts[number])
        if found:
            self._host.stop_word_finished_request_ids.add(number)


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
