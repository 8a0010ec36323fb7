"""Requests whose logits are no numbers any more: they end with an error."""

from __future__ import annotations

from collections.abc import Mapping

from absorbed_mla.serving.request_results import Progress, Result

MESSAGE = "the model's logits are NaN or infinite, so that no token can be drawn"


class Failures:
    """Cuts what such requests report: only tokens before the first one that is missing count.

    Megatron's engine goes on with another token until the request is ended, with the next step.
    """

    def __init__(self) -> None:
        # By number, how many tokens a request has that count.
        self._counts: dict[int, int] = {}
        self._of_step: Mapping[int, int] = {}

    @property
    def any_in_step(self) -> bool:
        """Whether the last step may have been one of a request that has failed."""
        return bool(self._of_step or self._counts)

    @property
    def numbers(self) -> set[int]:
        """Of the requests that have failed, but not ended."""
        return set(self._counts)

    def begin_step(self, failed: Mapping[int, int]) -> None:
        """A step has ended; see ``RequestSampler.failed``."""
        self._of_step = failed

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
            result = Result(
                result.tokens[:count],
                result.log_probs[:count],
                result.top_log_probs[:count],
                result.prompt_log_probs,
                result.prompt_top_log_probs,
                "error",
                MESSAGE,
            )
        new = max(count - before, 0)
        return Progress(
            number,
            progress.tokens[:new],
            progress.log_probs[:new],
            progress.top_log_probs[:new],
            result,
        )
