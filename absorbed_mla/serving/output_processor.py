"""One output while it is generated: its text, its stop strings, its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from absorbed_mla.serving.outputs import CompletionOutput, Logprob, PositionLogprobs
from absorbed_mla.serving.request_results import Progress, Result, TopLogProbs
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer


class Completion:
    """An output that grows with the progress of its request.

    Args:
        index: Of the output among those of its prompt.
        prompt: Token ids.
        params: As the user gave them.
        end_tokens: That end the text, besides ``params.stop_token_ids``.
        tokenizer: None leaves the text empty.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        end_tokens: Sequence[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self._params, self._tokenizer = params, tokenizer
        self._end_tokens = end_tokens
        self._stream = None
        if tokenizer is not None:
            skip = params.skip_special_tokens
            self._stream = tokenizer.stream(prompt, skip_special_tokens=skip)
        # The text so far, with what may yet turn out to be a stop string.
        self._text = ""
        self.output = CompletionOutput(index)
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0

    @property
    def finished(self) -> bool:
        """Whether nothing will be added."""
        return self.output.finish_reason is not None

    def advance(self, progress: Progress) -> None:
        """Add what a step of the engine generated."""
        for i, token in enumerate(progress.tokens):
            if self.finished:
                return
            self.output.token_ids.append(token)
            if self.output.logprobs is not None:
                self._add_logprobs(token, progress.log_probs[i], progress.top_log_probs[i:])
            self._add_text(token)
        if progress.result is not None and not self.finished:
            self._finish(progress.result)

    def abort(self) -> None:
        """End the output with what it has."""
        self._show_all()
        self.output.finish_reason = "abort"

    def _add_logprobs(self, token: int, log_prob: float, top: Sequence[TopLogProbs]) -> None:
        assert self.output.logprobs is not None and self._params.logprobs is not None
        found = position_logprobs(
            token, log_prob, top[0] if top else {}, self._params.logprobs, self._tokenizer
        )
        self.output.logprobs.append(found)
        assert self.output.cumulative_logprob is not None
        self.output.cumulative_logprob += log_prob

    def _add_text(self, token: int) -> None:
        """Add a token's text, and see whether the token or the text ends the output."""
        output, params = self.output, self._params
        stops = token in params.stop_token_ids or token in self._end_tokens
        stops = stops and len(output.token_ids) > params.min_tokens
        if self._stream is not None and (not stops or params.include_stop_str_in_output):
            before = len(self._text)
            self._text += self._stream.push([token])
            if self._ends_with_stop_string(before):
                return
        if stops:
            before = len(self._text)
            self._show_all()
            # What was held back may have one, which came before the token.
            if self._ends_with_stop_string(before):
                return
            output.finish_reason = "stop"
            output.stop_reason = token if token in params.stop_token_ids else None
        else:
            output.text = self._text[: len(self._text) - self._held_back()]

    def _ends_with_stop_string(self, before: int) -> bool:
        """Cut the text at the first stop string that ends after ``before``, if there is one."""
        params, found = self._params, []
        if len(self.output.token_ids) < params.min_tokens:
            return False
        for string in params.stop:
            place = self._text.find(string, max(0, before - len(string) + 1))
            if place >= 0:
                found.append((place, string))
        if not found:
            return False
        place, string = min(found)
        self._text = self._text[: place + len(string) * params.include_stop_str_in_output]
        self.output.text = self._text
        self.output.finish_reason, self.output.stop_reason = "stop", string
        return True

    def _held_back(self) -> int:
        """Length of the longest end of the text that a stop string may begin with."""
        longest = 0
        for string in self._params.stop:
            for length in range(min(len(string) - 1, len(self._text)), longest, -1):
                if self._text.endswith(string[:length]):
                    longest = length
                    break
        return longest

    def _show_all(self) -> None:
        if self._stream is not None:
            self._text += self._stream.finish()
        self.output.text = self._text

    def _finish(self, result: Result) -> None:
        before = len(self._text)
        self._show_all()
        if self._ends_with_stop_string(before):
            return
        if result.finish == "error":
            self.output.error = result.error
        known = result.finish in ("abort", "error")
        self.output.finish_reason = result.finish if known else "length"


def position_logprobs(
    token: int, log_prob: float, top: TopLogProbs, count: int, tokenizer: Tokenizer | None
) -> PositionLogprobs:
    """The log-probabilities of one position: of its token, and of the most likely ones.

    Args:
        token: At the position.
        log_prob: Of the token.
        top: Of at least ``count`` most likely tokens, best first.
        count: How many of them to return.
        tokenizer: For their texts.
    """
    best = list(top.items())[:count]
    ranks: dict[int, int | None] = {other: i + 1 for i, (other, _) in enumerate(best)}
    values = {token: log_prob, **dict(best)}
    return {
        other: Logprob(value, ranks.get(other), *_text_and_bytes(other, tokenizer))
        for other, value in values.items()
    }


def _text_and_bytes(token: int, tokenizer: Tokenizer | None) -> tuple[str | None, bytes | None]:
    if tokenizer is None:
        return None, None
    text = tokenizer.token_text(token)
    # A tokenizer of the caller's may be without.
    find = getattr(tokenizer, "token_bytes", None)
    return text, text.encode(errors="replace") if find is None else find(token)
