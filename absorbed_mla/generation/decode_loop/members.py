"""The running requests of a decode step, by row: Megatron's records, which get its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest
from numpy.typing import NDArray

from absorbed_mla.generation.requests import Progress, progress_of


class Members:
    """Does to the records of requests what Megatron does in a step that ends none of them.

    Args:
        host: Megatron's engine.
        numbers: Of the requests, by row.

    Attributes:
        numbers: Of the requests, by row.
    """

    def __init__(self, host: DynamicInferenceEngine, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self._records = {number: host.requests[number].record for number in numbers}
        self._parts = [self._records[number][-1] for number in numbers]
        # Rows that a stop word may end, with the tokens that do; None: longer words.
        self._stops = {
            row: _tokens_of(part.stop_word_ids)
            for row, part in enumerate(self._parts)
            if part.stop_word_ids
        }
        # A step without log-probabilities reports the last ones that a request has.
        self._scored = self._with("generated_log_probs")
        self._ranked = self._with("generated_top_n_logprobs")

    def stops(self, tokens: Sequence[int]) -> bool:
        """Whether a stop word ends one of the requests, or it is not certain that none does."""
        return any(words is None or tokens[row] in words for row, words in self._stops.items())

    def append(
        self, tokens: Sequence[int], log_probs: Sequence[float] | None
    ) -> list[Progress]:
        """Add a token to every request; returns their progress in the order of their numbers."""
        for row, part in enumerate(self._parts):
            part.generated_tokens.append(tokens[row])
            if log_probs is not None:
                _add_log_prob(part, log_probs[row])
        former = self._scored | self._ranked if log_probs is None else self._ranked
        found = []
        for row, number in enumerate(self.numbers):
            if number in former:
                found.append(progress_of(self._records[number], number, 1, None))
            else:
                scores = [] if log_probs is None else [log_probs[row]]
                found.append(Progress(number, [tokens[row]], scores))
        found.sort(key=lambda progress: progress.number)
        return found

    def move(self, former: NDArray, places: NDArray) -> None:
        """Rows have moved from ``former`` to ``places``."""
        numbers = [self.numbers[row] for row in former]
        parts = [self._parts[row] for row in former]
        stops = [self._stops.get(row) if row in self._stops else () for row in former.tolist()]
        for row, number, part, words in zip(places.tolist(), numbers, parts, stops):
            self.numbers[row], self._parts[row] = number, part
            self._stops.pop(row, None)
            if words != ():
                self._stops[row] = words

    def _with(self, name: str) -> set[int]:
        """Requests of which a part has something in the list of this name."""
        records = self._records.items()
        return {number for number, one in records if any(getattr(p, name) for p in one.requests)}


def _tokens_of(words: Sequence[Sequence[int]]) -> frozenset[int] | None:
    """Stop words of one token each; None if there are longer ones."""
    if any(len(word) != 1 for word in words):
        return None
    return frozenset(word[0] for word in words)


def _add_log_prob(part: DynamicInferenceRequest, log_prob: float) -> None:
    """As Megatron adds it to a request whose prompt has none."""
    part.prompt_log_probs = part.prompt_log_probs or []
    part.generated_log_probs = part.generated_log_probs or []
    part.generated_log_probs.append(log_prob)
