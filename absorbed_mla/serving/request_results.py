"""The requests of an engine: their progress after a step, and their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    Status,
)

from absorbed_mla.serving.sampling.parameters import SamplingParams

if TYPE_CHECKING:
    from absorbed_mla.serving.sampling.device_sampler import SampledRequest
    from absorbed_mla.serving.structured_output.request_grammar import RequestGrammar

# Error of a request whose logits are no numbers any more.
NON_FINITE_LOGITS = "the model's logits are NaN or infinite, so that no token can be drawn"
NO_ALLOWED_TOKEN = (
    "no token can be drawn: the model's logits are NaN or infinite, or structured_outputs leaves "
    "none, beside other parameters or after too much work"
)
_SCHEDULED = DynamicInferenceEventType.ADD_CONTEXT
# Log-probabilities of the most likely tokens at one position, by token.
TopLogProbs = dict[int, float]


@dataclass
class Result:
    """Result of a request that has ended.

    Attributes:
        tokens: Generated token ids, the token that stopped the request included.
        log_probs: Log-probability of each token, if ``SamplingParams.logprobs`` asked for them.
        top_log_probs: For each token, those of the most likely ones.
        prompt_log_probs: Of the prompt's tokens but the first, if ``prompt_logprobs`` asked for
            them.
        prompt_top_log_probs: At the same positions, those of the most likely tokens.
        finish: Why it ended: ``"stop"`` (a stop token, or its grammar allows nothing more),
            ``"length"`` (``max_tokens``), ``"context"`` (the engine's ``max_sequence_length``, or
            without ``max_tokens`` the size of its cache), ``"abort"``, ``"error"`` (no token can be
            drawn), or ``""`` if it could not run.
        error: Why the request could not run or go on, or ``""``.
        first_scheduled: When the first step for it began, in seconds since the epoch; None if it
            had none.
        num_cached_tokens: Of the prompt, in blocks that the prefix cache had.
        routed_experts: NumPy's array [tokens, layers with experts, K] of the tokens that went
            through the model, from ``routed_experts_prompt_start`` on, in the dtype of
            :func:`~absorbed_mla.serving.routed_experts.dtype_of`; None unless
            ``enable_return_routed_experts`` asks for it, and without a generated token.
        indexer_topk: Likewise of the keys that layers with an indexer have chosen: int32 [tokens,
            layers, topk], positions in the request, ascending, then -1.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top_log_probs: list[TopLogProbs] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    first_scheduled: float | None = field(default=None, compare=False)
    num_cached_tokens: int = 0
    routed_experts: Any = field(default=None, compare=False)
    indexer_topk: Any = field(default=None, compare=False)


# Not frozen, which makes one in twice the time: there is one of every request and step.
@dataclass(slots=True)
class Progress:
    """What one step did for one request.

    Attributes:
        number: The request's number, as ``Engine.add_request`` returned it.
        tokens: New token ids.
        log_probs: Of the new tokens, as in :class:`Result`; if another request of the step has
            asked for its own, also without having been asked for.
        top_log_probs: Likewise.
        result: The result if the request has ended, otherwise None.
        start: Of a request's first tokens: ``first_scheduled`` and ``num_cached_tokens`` of its
            later result. None with others, and with a result.
    """

    number: int
    tokens: list[int]
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    result: Result | None = None
    start: tuple[float | None, int] | None = field(default=None, compare=False)

    def __reduce__(self) -> tuple:
        """For pipes, in half of the time that slots take by themselves."""
        fields = self.number, self.tokens, self.log_probs, self.top_log_probs, self.result
        return Progress, fields if self.start is None else (*fields, self.start)


class Failures:
    """Requests whose logits are not finite: only tokens before the first missing one count.

    Megatron's engine goes on with another token until the request is ended, with the next step.

    Attributes:
        numbers: Of the requests that have failed, but not ended.
        active: Whether the last step may have been one of a request that has failed.
    """

    def __init__(self) -> None:
        # By number, how many tokens a request has that count.
        self._counts: dict[int, int] = {}
        self._of_step: Mapping[int, int] = {}
        self.numbers = self._counts.keys()
        self.active = False

    def begin_step(self, failed: Mapping[int, int]) -> None:
        """A step has ended; see ``RequestSampler.failed``."""
        self._of_step = failed
        self.active = bool(failed or self._counts)

    def cut(self, progress: Progress, before: int) -> Progress:
        """Progress without the tokens after a failure, if there is one.

        Args:
            progress: What the last step did for a request.
            before: How many tokens the request had before.
        """
        number = progress.number
        place = self._of_step.get(number)
        if place is not None and place < len(progress.tokens):
            self._counts.setdefault(number, before + place)
        if number not in self._counts:
            return progress
        count, result = self._counts[number], progress.result
        if result is not None:
            del self._counts[number]
            names = "tokens", "log_probs", "top_log_probs"
            cut = {name: getattr(result, name)[:count] for name in names}
            result = replace(result, **cut, finish="error", error=NON_FINITE_LOGITS)
        new = max(count - before, 0)
        return Progress(
            number,
            progress.tokens[:new],
            progress.log_probs[:new],
            progress.top_log_probs[:new],
            result,
        )


class EngineRequests:
    """The requests of an engine that have not ended, and the results of those that have.

    Args:
        sampled: What the sampler knows of the requests, which are removed with their ends.

    Attributes:
        params: By number, sampling parameters of what has not ended.
        results: By number, the results of what has ended.
        unreported: Of requests that ended without a forward pass.
        to_abort: Numbers of requests to be aborted.
        failures: Of requests whose logits are not finite.
        without_tokens: Numbers of requests that have none yet.
    """

    def __init__(self, sampled: dict[int, SampledRequest]) -> None:
        self._sampled = sampled
        self.params: dict[int, SamplingParams] = {}
        self.results: dict[int, Result] = {}
        self.unreported: list[Progress] = []
        self.to_abort: set[int] = set()
        self.failures = Failures()
        self.without_tokens: set[int] = set()

    def begin(self, number: int, params: SamplingParams, sampled: SampledRequest) -> None:
        """A request that can run is queued."""
        self.params[number], self._sampled[number] = params, sampled
        self.without_tokens.add(number)

    def end(self, number: int, result: Result) -> None:
        """End a request without a forward pass; its result is for the next report."""
        self._keep(number, result)
        self.unreported.append(Progress(number, [], result=result))

    def end_aborted(self, host: DynamicInferenceEngine) -> None:
        """Take requests out of Megatron's queue that are to end; it ends those that run."""
        # Callers take results away, so these do not say what has ended.
        self.to_abort &= self.params.keys()
        host.stop_word_finished_request_ids |= self.to_abort
        for number in sorted(host.stop_word_finished_request_ids):
            if number == host.context.chunked_prefill_request_id:
                # Megatron would forget that it is to end.
                host.stop_word_finished_request_ids.discard(number)
            elif number in host.waiting_request_ids:
                host.waiting_request_ids.remove(number)
                host.stop_word_finished_request_ids.discard(number)
                self._end_waiting(number, host.requests.pop(number).record)

    def _end_waiting(self, number: int, record: DynamicInferenceRequestRecord) -> None:
        """End a request that waits; it may have been evicted in the step it was to end in."""
        result = self._result_of(number, record)
        ended = self._cut(Progress(number, [], result=result), len(result.tokens))
        assert ended.result is not None
        self.end(number, ended.result)

    def without_failures(self, progress: Sequence[Progress]) -> Sequence[Progress]:
        """Progress of requests whose tokens the sampler has, without those of failures."""
        cut = []
        for one in progress:
            before = len(self._sampled[one.number].generated) - len(one.tokens)
            cut.append(self._cut(one, before))
        return [one for one in cut if one.tokens or one.result]

    def progress(
        self, records: Mapping[int, tuple[DynamicInferenceRequestRecord, bool]]
    ) -> Iterator[Progress]:
        """Progress by Megatron's record of every request, and whether the request has ended."""
        for number, (record, ended) in records.items():
            before = len(self._sampled[number].generated)
            new = count_tokens(record) - before
            result = None
            if ended:
                result = self._result_of(number, record)
            if new or ended:
                progress = progress_of(record, number, new, result)
                self._sampled[number].generated.extend(progress.tokens)
                progress = self._cut(progress, before)
                if progress.tokens or ended:
                    yield progress
                result = progress.result
            if result is not None:
                self._keep(number, result)

    def _result_of(self, number: int, record: DynamicInferenceRequestRecord) -> Result:
        params, grammar = self.params[number], self._sampled[number].grammar
        return result_of(record, params, aborted=number in self.to_abort, grammar=grammar)

    def _cut(self, progress: Progress, before: int) -> Progress:
        """See ``Failures.cut``."""
        cut = self.failures.cut(progress, before)
        failed = cut.result is not None and cut.result.error == NON_FINITE_LOGITS
        if failed and self._sampled[progress.number].grammar is not None:
            assert cut.result is not None
            cut.result.error = NO_ALLOWED_TOKEN
        return cut

    def tell_starts(self, progress: Sequence[Progress], entries: Mapping[int, Any]) -> None:
        """Say when requests began that got their first tokens in a step.

        Args:
            progress: Of the step.
            entries: Of Megatron's engine, by number, each with a ``record``.
        """
        for one in progress:
            if one.number in self.without_tokens:
                self.without_tokens.discard(one.number)
                one.start = start_of(entries[one.number].record)

    def _keep(self, number: int, result: Result) -> None:
        self.results[number] = result
        self.without_tokens.discard(number)
        self._sampled.pop(number, None)
        self.params.pop(number, None)


def count_tokens(record: DynamicInferenceRequestRecord) -> int:
    """Number of tokens generated so far; Megatron starts a new part at every eviction."""
    return sum(len(part.generated_tokens) for part in record.requests)


def last_of(record: DynamicInferenceRequestRecord, name: str, count: int) -> list:
    """The entries of a list, which every part of a request has, for the last ``count`` tokens."""
    found: list = []
    for part in reversed(record.requests):
        missing = count - len(found)
        if missing <= 0:
            break
        found = _of_generated(part, name)[-missing:] + found
    return found


def _of_generated(part: DynamicInferenceRequest, name: str) -> list:
    """Entries for the tokens that a part has generated.

    Where its prompt was read in chunks, Megatron has put those of the chunks' ends before them.
    """
    entries = getattr(part, name) or []
    return entries[max(0, len(entries) - len(part.generated_tokens)) :]


def progress_of(
    record: DynamicInferenceRequestRecord, number: int, count: int, result: Result | None
) -> Progress:
    """The last ``count`` tokens of a request."""
    last = record[-1]
    if count <= len(last.generated_tokens) and not _has_log_probs(record):
        tokens = last.generated_tokens
        return Progress(number, tokens[len(tokens) - count :], result=result)
    return Progress(
        number,
        last_of(record, "generated_tokens", count),
        last_of(record, "generated_log_probs", count),
        list(map(_by_token, last_of(record, "generated_top_n_logprobs", count))),
        result,
    )


def _has_log_probs(record: DynamicInferenceRequestRecord) -> bool:
    return any(
        part.generated_log_probs or part.generated_top_n_logprobs for part in record.requests
    )


def result_of(
    record: DynamicInferenceRequestRecord,
    sampling: SamplingParams,
    *,
    aborted: bool,
    grammar: RequestGrammar | None = None,
) -> Result:
    """The result of a request that Megatron's engine is done with."""
    result = Result(tokens=_joined(record, "generated_tokens"))
    result.first_scheduled, result.num_cached_tokens = start_of(record)
    # Megatron computes them for all requests of a step if one of them has asked.
    if sampling.logprobs is not None:
        result.log_probs = _joined(record, "generated_log_probs")
        top = last_of(record, "generated_top_n_logprobs", len(result.tokens))
        result.top_log_probs = list(map(_by_token, top))
    if sampling.prompt_logprobs is not None:
        result.prompt_log_probs = _of_prompt(record, "prompt_log_probs")
        result.prompt_top_log_probs = list(
            map(_by_token, _of_prompt(record, "prompt_top_n_logprobs"))
        )
    last = record[-1]
    if last.status == Status.FAILED:
        errors = [type(e.payload).__name__ for e in last.events if e.payload is not None]
        result.error = ", ".join(errors) or "the engine failed"
    elif (result.tokens and result.tokens[-1] in sampling.stop_token_ids) or (
        grammar is not None and grammar.completed_by(result.tokens)
    ):
        result.finish = "stop"
    elif len(result.tokens) == sampling.max_tokens:
        result.finish = "length"
    else:
        result.finish = "abort" if aborted else "context"
    return result


def start_of(record: DynamicInferenceRequestRecord) -> tuple[float | None, int]:
    """When the first step for a request began, and how many of its prompt's tokens were cached.

    Its first part knows: others have read again what was evicted.
    """
    part = record.requests[0]
    begun = (one.timestamp for one in getattr(part, "events", ()) if one.type is _SCHEDULED)
    # Megatron tells it of the last chunk of a prompt.
    times = filter(None, (getattr(record, "first_chunk", None), next(begun, None)))
    return min(times, default=None), getattr(part, "num_cached_tokens", 0)


def _joined(record: DynamicInferenceRequestRecord, name: str) -> list:
    return [entry for part in record.requests for entry in getattr(part, name) or ()]


def _of_prompt(record: DynamicInferenceRequestRecord, name: str) -> list:
    """Entries for the prompt's tokens but the first.

    A part that begins after an eviction has a prompt that is longer by what was generated; one that
    was evicted while its prompt was read has too few entries.
    """
    count = len(record.requests[0].prompt_tokens) - 1
    lists = [getattr(part, name) or [] for part in record.requests]
    return next((found[:count] for found in lists if len(found) >= count), [])


def _by_token(top: dict[str, float]) -> TopLogProbs:
    """Megatron's keys are texts of its tokenizer, which are the tokens' numbers."""
    return {int(token): log_prob for token, log_prob in top.items()}
