"""Results of requests, and their progress after a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.core.inference.inference_request import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    Status,
)

from absorbed_mla.serving.sampling.parameters import SamplingParams

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
        finish: Why it ended: ``"stop"`` (a stop token), ``"length"`` (``max_tokens``),
            ``"context"`` (the engine's ``max_sequence_length``, or without ``max_tokens`` the size
            of its cache), ``"abort"``, ``"error"`` (the model's logits are NaN or infinite), or
            ``""`` if it could not run.
        error: Why the request could not run or go on, or ``""``.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top_log_probs: list[TopLogProbs] = field(default_factory=list)
    finish: str = ""
    error: str = ""


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
    """

    number: int
    tokens: list[int]
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    result: Result | None = None

    def __reduce__(self) -> tuple:
        """For pipes, in half of the time that slots take by themselves."""
        fields = self.number, self.tokens, self.log_probs, self.top_log_probs, self.result
        return Progress, fields


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
    record: DynamicInferenceRequestRecord, sampling: SamplingParams, *, aborted: bool
) -> Result:
    """The result of a request that Megatron's engine is done with."""
    result = Result(tokens=_joined(record, "generated_tokens"))
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
    elif result.tokens and result.tokens[-1] in sampling.stop_token_ids:
        result.finish = "stop"
    elif len(result.tokens) == sampling.max_tokens:
        result.finish = "length"
    else:
        result.finish = "abort" if aborted else "context"
    return result


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
