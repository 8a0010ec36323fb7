"""The running requests of a decode step, by row: Megatron's records, which get its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest

from absorbed_mla.generation.requests import Progress, progress_of
from absorbed_mla.generation.sampler import RequestSampler


class Members:
    """Does to the records of requests what Megatron does in a step that ends none of them.

    Args:
        host: Megatron's engine.
        sampler: Of the engine; it gets the tokens, too.
        numbers: Of the requests, by row.

    Attributes:
        sampled: What the sampler knows of the requests, by row.
    """

    def __init__(
        self, host: DynamicInferenceEngine, sampler: RequestSampler, numbers: Sequence[int]
    ) -> None:
        self._numbers = list(numbers)
        # In the order of their numbers.
        self._records = {number: host.requests[number].record for number in sorted(numbers)}
        self._parts = [self._records[number][-1] for number in numbers]
        self.sampled = [sampler.request(number) for number in numbers]
        # Where their tokens are kept, which is for as long as they run.
        self._tokens = [
            (part.generated_tokens, one.generated) for part, one in zip(self._parts, self.sampled)
        ]
        # By row, the words of tokens that may end it; rows without any are left out.
        parts = enumerate(self._parts)
        self._stops = {row: part.stop_word_ids for row, part in parts if part.stop_word_ids}
        # A step without log-probabilities reports the last ones that a request has.
        self._scored = self._with("generated_log_probs")
        self._ranked = self._with("generated_top_n_logprobs")

    def stops(self, tokens: Sequence[int]) -> bool:
        """Whether a stop word ends one of the requests, or it is not certain that none does."""
        rows = self._stops.items()
        return any(len(word) > 1 or word[0] == tokens[row] for row, words in rows for word in words)

    def append(self, tokens: Sequence[int], log_probs: Sequence[float] | None) -> list[Progress]:
        """Add a token to every request; returns their progress in the order of their numbers."""
        for (ours, theirs), token in zip(self._tokens, tokens):
            ours.append(token)
            theirs.append(token)
        if log_probs is not None:
            for part, value in zip(self._parts, log_probs):
                _add_log_prob(part, value)
        if self._ranked or (self._scored and log_probs is None):
            records = self._records.items()
            return [progress_of(record, number, 1, None) for number, record in records]
        if log_probs is None:
            found = dict(zip(self._numbers, tokens))
            return [Progress(number, [found[number]]) for number in self._records]
        scored = dict(zip(self._numbers, zip(tokens, log_probs)))
        return [Progress(n, [scored[n][0]], [scored[n][1]]) for n in self._records]

    def move(self, former: Sequence[int], places: Sequence[int]) -> None:
        """Rows have moved from ``former`` to ``places``."""
        tables: tuple[list[Any], ...] = (
            *(self._numbers, self._parts),
            *(self.sampled, self._tokens),
        )
        for values in tables:
            moved = [values[row] for row in former]
            for row, value in zip(places, moved):
                values[row] = value
        if self._stops:
            stops = [self._stops.pop(row, None) for row in former]
            found = zip(places, stops)
            self._stops |= {row: words for row, words in found if words is not None}

    def _with(self, name: str) -> set[int]:
        """Requests of which a part has something in the list of this name."""
        records = self._records.items()
        return {number for number, one in records if any(getattr(p, name) for p in one.requests)}


def _add_log_prob(part: DynamicInferenceRequest, log_prob: float) -> None:
    """As Megatron adds it to a request whose prompt has none."""
    part.prompt_log_probs = part.prompt_log_probs or []
    part.generated_log_probs = part.generated_log_probs or []
    part.generated_log_probs.append(log_prob)
