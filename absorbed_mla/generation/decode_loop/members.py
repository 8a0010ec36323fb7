"""The running requests of decode steps: Megatron's records, which get their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    Status,
)

from absorbed_mla.generation.requests import Progress, progress_of
from absorbed_mla.generation.sampler import RequestSampler, SampledRequest


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token that a step has drawn.

    Attributes:
        number: Of the request.
        token: Its id.
        log_prob: None: not asked for.
    """

    number: int
    token: int
    log_prob: float | None


class Members:
    """Does to the records of requests what Megatron does in a step that pauses and evicts none.

    Args:
        host: Megatron's engine.
        sampler: Of the engine; it gets the tokens, too.
        numbers: Of the requests, by row.

    Attributes:
        numbers: Of the requests, by row of the last step that was prepared.
    """

    def __init__(
        self, host: DynamicInferenceEngine, sampler: RequestSampler, numbers: Sequence[int]
    ) -> None:
        self._host, self.numbers = host, list(numbers)
        # In the order of their numbers, in which progress is reported.
        self._records = {number: host.requests[number].record for number in sorted(numbers)}
        self._parts = {number: record[-1] for number, record in self._records.items()}
        self._sampled = {number: sampler.request(number) for number in numbers}
        # Where their tokens are kept, which is for as long as they run.
        self._tokens = {
            number: (part.generated_tokens, self._sampled[number].generated)
            for number, part in self._parts.items()
        }
        self._with_stop_words = {n for n, part in self._parts.items() if part.stop_word_ids}
        # A step without log-probabilities reports the last ones that a request has.
        self._scored = self._with("generated_log_probs")
        self._ranked = self._with("generated_top_n_logprobs")

    def move(self, order: Sequence[int]) -> None:
        """Rows are others; ``order`` has, for each of them, the row that it was."""
        self.numbers = [self.numbers[row] for row in order]

    def sampled(self) -> list[SampledRequest]:
        """What the sampler knows of the requests, by row."""
        return [self._sampled[number] for number in self.numbers]

    def append(self, drawn: Sequence[Drawn]) -> list[Progress]:
        """Add a token to each of these requests; returns their progress by ascending numbers."""
        scored = False
        for one in drawn:
            ours, theirs = self._tokens[one.number]
            ours.append(one.token)
            theirs.append(one.token)
            if one.log_prob is not None:
                scored = True
                _add_log_prob(self._parts[one.number], one.log_prob)
        for number in self._with_stop_words & {one.number for one in drawn}:
            self._look_for_stop_words(number)
        ascending = sorted(drawn, key=lambda one: one.number)
        if self._ranked or (self._scored and not scored):
            return [
                progress_of(self._records[one.number], one.number, 1, None) for one in ascending
            ]
        if not scored:
            return [Progress(one.number, [one.token]) for one in ascending]
        return [Progress(one.number, [one.token], [one.log_prob or 0.0]) for one in ascending]

    def end(self, number: int, drawn: Drawn | None) -> DynamicInferenceRequestRecord:
        """End a request, with a last token unless it was told to end; returns Megatron's record.

        The sampler does not get the token, by which the engine knows that it is new.
        """
        host, record, part = self._host, self._records.pop(number), self._parts.pop(number)
        if drawn is not None:
            part.generated_tokens.append(drawn.token)
            if drawn.log_prob is not None:
                _add_log_prob(part, drawn.log_prob)
        host.stop_word_finished_request_ids.discard(number)
        host.finished_request_count += 1
        part.generated_length = len(part.generated_tokens)
        part.status = Status.COMPLETED
        part.add_event_finish()
        host.requests.pop(number).future.set_result(record)
        for held in (self._with_stop_words, self._scored, self._ranked):
            held.discard(number)
        return record

    def _look_for_stop_words(self, number: int) -> None:
        """Let a request end with the next step, as Megatron does, after one of its stop words."""
        found, _ = self._host._check_stop_words_for_request_post_append(self._parts[number])
        if found:
            self._host.stop_word_finished_request_ids.add(number)

    def _with(self, name: str) -> set[int]:
        """Requests of which a part has something in the list of this name."""
        records = self._records.items()
        return {number for number, one in records if any(getattr(p, name) for p in one.requests)}


def _add_log_prob(part: DynamicInferenceRequest, log_prob: float) -> None:
    """As Megatron adds it to a request whose prompt has none."""
    part.prompt_log_probs = part.prompt_log_probs or []
    part.generated_log_probs = part.generated_log_probs or []
    part.generated_log_probs.append(log_prob)
