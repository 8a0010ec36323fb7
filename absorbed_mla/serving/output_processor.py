"""The output processor: the outputs of requests, from what the engine's steps have generated."""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from absorbed_mla.serving.executor.commands import Abort, Add, Command, SetVocabulary
from absorbed_mla.serving.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.stop_strings import StopStrings
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer

if TYPE_CHECKING:
    from absorbed_mla.serving.prompts import EncodedPrompt
    from absorbed_mla.serving.request_results import Progress, Result, TopLogProbs
    from absorbed_mla.serving.structured_output.vocabulary import TokenVocabulary

_logger = logging.getLogger(__name__)


@dataclass
class _Request:
    """A prompt and its outputs."""

    output: RequestOutput
    params: SamplingParams
    completions: list[Completion] = field(default_factory=list)
    # Of the engine, by output.
    numbers: list[int] = field(default_factory=list)
    # Outputs that have not ended.
    left: int = 0


class OutputProcessor:
    """Makes outputs of the engine's progress, for all requests that have not ended.

    It begins anew with every ``wake``.

    Args:
        tokenizer: Of texts; None leaves them empty.
        waits_for_results: Whether an output that ends here, as at a stop string, is not over until
            the engine has ended it, too, and says what only it knows.

    Attributes:
        of_calls: Ids of requests that belong to whole calls, until those end.
        unclaimed: By id, outputs that have grown in a step of somebody who does not wait for them.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, waits_for_results: bool = False) -> None:
        self._tokenizer, self._waits = tokenizer, waits_for_results
        self._names = itertools.count()
        self._requests: dict[str, _Request] = {}
        self.of_calls: set[str] = set()
        self.unclaimed: dict[str, RequestOutput] = {}
        self.forget()

    def forget(self) -> None:
        """Begin anew, with the engine; names are not used again.

        Whole calls that run get what their requests have, as aborted.
        """
        for name in self._requests:
            self.abort(name)
        left = self.unclaimed | {name: one.output for name, one in self._requests.items()}
        self.unclaimed = {name: one for name, one in left.items() if name in self.of_calls}
        self._requests = {}
        # By the engine's numbers: what is not over there.
        self._running: dict[int, tuple[_Request, Completion]] = {}
        self._commands: list[Command] = []
        self._knows_vocabulary = False
        self._aborted: list[RequestOutput] = []
        self._num_added = 0

    def are_left(self) -> bool:
        """Whether there is something to run or to report but for whole calls."""
        running = (request.output.request_id for request, _ in self._running.values())
        names = itertools.chain(self._requests, self.unclaimed, running)
        return any(name not in self.of_calls for name in names)

    def add(self, prompt: EncodedPrompt, params: SamplingParams, name: str | None) -> str:
        """Queue a prompt; returns its id.

        Args:
            prompt: Token ids, and what the engine gets with them.
            params: As the user gave them.
            name: The id; None makes one.

        Raises:
            ValueError: If a request with this id runs, or is still to be reported.
        """
        if name is None:
            name = next(one for one in map(str, self._names) if not self._is_taken(one))
        elif self._is_taken(name):
            raise ValueError(f"request_id {name!r} is that of a request that runs")
        tokens, ends = prompt.tokens, prompt.end_tokens
        of_request = prompt.cache_salt, prompt.lora_request, prompt.priority
        request = _Request(RequestOutput(name, prompt.text, tokens, []), params, left=params.n)
        # An array goes through a pipe in a fifth of a list's time.
        prompt_tokens = array("q", tokens)
        for index in range(params.n):
            completion = Completion(index, tokens, params, ends, self._tokenizer)
            number = self._num_added
            self._num_added += 1
            own = _of_other_output(prompt.of_engine, index)
            self._commands.append(Add(prompt_tokens, own, *of_request))
            self._running[number] = request, completion
            request.completions.append(completion)
            request.output.outputs.append(completion.output)
            request.numbers.append(number)
        self._requests[name] = request
        return name

    def set_vocabulary(self, vocabulary: TokenVocabulary) -> None:
        """Tell the engine, once, the texts of tokens."""
        if not self._knows_vocabulary:
            self._commands.append(SetVocabulary(vocabulary))
            self._knows_vocabulary = True

    def abort(self, name: str) -> None:
        """End a request; its outputs keep what they have. Unknown ids are ignored: it has ended."""
        request = self._requests.get(name)
        if request is None or request.output.finished:
            return
        for completion, number in zip(request.completions, request.numbers):
            if not completion.finished:
                completion.abort()
                self._stop(number)
        request.output.finished = True
        self._aborted.append(request.output)

    def drop(self, names: Collection[str]) -> None:
        """End the requests of a whole call that has ended; nobody gets their outputs any more."""
        for name in names:
            self.abort(name)
            self._requests.pop(name, None)
            self.unclaimed.pop(name, None)
        self._aborted = [one for one in self._aborted if one.request_id not in names]
        self.of_calls.difference_update(names)

    def commands(self) -> Sequence[Command]:
        """What the engine has not been told yet; it is told now."""
        commands, self._commands = self._commands, []
        return commands

    def process(self, progress: Sequence[Progress]) -> None:
        """Let outputs grow by a step; they are unclaimed then, and forgotten here if they ended.

        Raises:
            RuntimeError: If the engine refused a request.
        """
        grown: dict[str, RequestOutput] = {}
        for one in progress:
            request = self._advance(one)
            if request is not None:
                grown[request.output.request_id] = request.output
        grown |= {output.request_id: output for output in self._aborted}
        self._aborted = []
        for output in grown.values():
            if output.finished:
                del self._requests[output.request_id]
        self.unclaimed |= grown

    def has_unclaimed(self, is_own: Callable[[str], bool]) -> bool:
        """Whether outputs of requests that a caller waits for have grown already."""
        return any(map(is_own, self.unclaimed))

    def claim(self, is_own: Callable[[str], bool]) -> list[RequestOutput]:
        """A caller's outputs that have grown.

        Args:
            is_own: Whether the caller waits for the request with an id.

        Returns:
            In the order of their steps, which is that of all ranks.
        """
        return [self.unclaimed.pop(name) for name in list(self.unclaimed) if is_own(name)]

    def _advance(self, progress: Progress) -> _Request | None:
        """The request of an engine's progress, if its outputs have grown."""
        request, completion = self._running[progress.number]
        start, result = progress.start, progress.result
        if result is not None:
            start = result.first_scheduled, result.num_cached_tokens
            del self._running[progress.number]
            self._add_prompt_logprobs(request, result)
            if result.finish == "error":
                name = request.output.request_id
                _logger.error("request %s has failed: %s", name, result.error)
            elif result.error:
                raise RuntimeError(f"the engine refused a request: {result.error}")
        if start is not None and start[0] is not None and completion.output.index == 0:
            request.output.first_scheduled_time, request.output.num_cached_tokens = start
        waited = completion.finished
        if waited and (result is None or not self._waits or request.output.finished):
            return None
        completion.advance(progress)
        if completion.finished and result is None:
            self._stop(progress.number)
            if self._waits:
                return None
        if completion.finished:
            request.left -= 1
            request.output.finished = not request.left
        return request

    def _add_prompt_logprobs(self, request: _Request, result: Result) -> None:
        count, output = request.params.prompt_logprobs, request.output
        if count is None or output.prompt_logprobs is not None or not result.prompt_log_probs:
            return
        tops = result.prompt_top_log_probs or [{}] * len(result.prompt_log_probs)
        output.prompt_logprobs = [None]
        for token, log_prob, top in zip(
            output.prompt_token_ids[1:], result.prompt_log_probs, tops, strict=True
        ):
            output.prompt_logprobs.append(
                position_logprobs(token, log_prob, top, count, self._tokenizer)
            )

    def _is_taken(self, name: str) -> bool:
        return name in self._requests or name in self.unclaimed or name in self.of_calls

    def _stop(self, number: int) -> None:
        """Have the engine end an output that has ended here."""
        self._commands.append(Abort(number))


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
        self._end_tokens, self._prompt_length = end_tokens, len(prompt)
        self._stream = None
        if tokenizer is not None:
            skip = params.skip_special_tokens
            self._stream = tokenizer.stream(prompt, skip_special_tokens=skip)
        # The text so far, with what may yet turn out to be a stop string.
        self._text = ""
        self._stop_strings = StopStrings(params.stop) if params.stop else None
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
                break
            self.output.token_ids.append(token)
            if self.output.logprobs is not None:
                self._add_logprobs(token, progress.log_probs[i], progress.top_log_probs[i:])
            self._add_text(token)
        if progress.result is not None:
            if not self.finished:
                self._finish(progress.result)
            for name in ("routed_experts", "indexer_topk"):
                self._add_choices(name, getattr(progress.result, name))

    def _add_choices(self, name: str, found: Any) -> None:
        """Of the tokens of the output, after which the engine may have generated others."""
        if found is not None:
            first = getattr(self._params, f"{name}_prompt_start")
            count = self._prompt_length + len(self.output.token_ids) - 1 - first
            setattr(self.output, name, found[:count])

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
            self._text += self._stream.push([token])
            if self._ends_with_stop_string():
                return
        if stops:
            self._show_all()
            # What was held back may have one, which came before the token.
            if self._ends_with_stop_string():
                return
            output.finish_reason = "stop"
            output.stop_reason = token if token in params.stop_token_ids else None
        elif self._stop_strings is None:
            output.text = self._text
        else:
            output.text = self._text[: len(self._text) - self._stop_strings.held_back]

    def _ends_with_stop_string(self) -> bool:
        """Cut the text at the first stop string that ends in what is new, if there is one."""
        if self._stop_strings is None:
            return False
        found, params = self._stop_strings.read(self._text), self._params
        if found is None or len(self.output.token_ids) < params.min_tokens:
            return False
        place, string = found
        self._text = self._text[: place + len(string) * params.include_stop_str_in_output]
        self.output.text = self._text
        self.output.finish_reason, self.output.stop_reason = "stop", string
        return True

    def _show_all(self) -> None:
        if self._stream is not None:
            self._text += self._stream.finish()
        self.output.text = self._text

    def _finish(self, result: Result) -> None:
        self._show_all()
        if self._ends_with_stop_string():
            return
        if result.finish == "error":
            self.output.error = result.error
        known = result.finish in ("abort", "error", "stop")
        self.output.finish_reason = result.finish if known else "length"


def _of_other_output(of_first: SamplingParams, index: int) -> SamplingParams:
    """What the engine gets for another one, which has a seed of its own."""
    if of_first.seed is None or not index:
        return of_first
    # It imports torch, which takes long.
    from absorbed_mla.serving.sampling.device_sampler import derive_seed

    return of_first.derived(seed=derive_seed(of_first.seed, index))


def position_logprobs(
    token: int, log_prob: float, top: TopLogProbs, count: int, tokenizer: Tokenizer | None
) -> PositionLogprobs:
    """The log-probabilities of one position: of its token, and of the most likely ones.

    Args:
        top: Of at least ``count`` most likely tokens, best first.
        count: How many of them to return.
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
