"""The requests of an ``LLM``: prompts whose outputs run, and what the engine is told of them."""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from absorbed_mla.serving.output_processor import Completion, position_logprobs
from absorbed_mla.serving.outputs import RequestOutput
from absorbed_mla.serving.prompts import of_output
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer

if TYPE_CHECKING:
    from absorbed_mla.serving.executor.local import Abort, Add
    from absorbed_mla.serving.request_results import Progress, Result


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


class Requests:
    """What has not ended, from the last ``wake`` on.

    Args:
        tokenizer: Of texts; None leaves them empty.

    Attributes:
        of_calls: Ids of requests that belong to whole calls, until those end.
        unclaimed: By id, outputs that have grown in a step of somebody who does not wait for them.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
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
        self._commands: list[Add | Abort] = []
        self._aborted: list[RequestOutput] = []
        self._num_added = 0

    @property
    def num_running(self) -> int:
        """Number of outputs that run or wait."""
        return len(self._running)

    def are_left(self) -> bool:
        """Whether there is something to run or to report but for whole calls."""
        running = (request.output.request_id for request, _ in self._running.values())
        names = itertools.chain(self._requests, self.unclaimed, running)
        return any(name not in self.of_calls for name in names)

    def add(
        self,
        prompt: str | None,
        tokens: list[int],
        params: SamplingParams,
        name: str | None,
        ends: Sequence[int],
    ) -> str:
        """Queue a prompt; returns its id.

        Args:
            prompt: Its text, if it was given as one.
            tokens: Token ids.
            params: As the user gave them.
            name: The id; None makes one.
            ends: Tokens that end an output, besides ``params.stop_token_ids``.

        Raises:
            ValueError: If a request with this id runs, or is still to be reported.
        """
        from absorbed_mla.serving.executor.local import Add

        if name is None:
            name = next(one for one in map(str, self._names) if not self._is_taken(one))
        elif self._is_taken(name):
            raise ValueError(f"request_id {name!r} is that of a request that runs")
        request = _Request(RequestOutput(name, prompt, tokens, []), params, left=params.n)
        # An array goes through a pipe in a fifth of a list's time.
        prompt_tokens = array("q", tokens)
        for index in range(params.n):
            completion = Completion(index, tokens, params, ends, self._tokenizer)
            number = self._num_added
            self._num_added += 1
            self._commands.append(Add(prompt_tokens, of_output(params, index, ends)))
            self._running[number] = request, completion
            request.completions.append(completion)
            request.output.outputs.append(completion.output)
            request.numbers.append(number)
        self._requests[name] = request
        return name

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

    def commands(self) -> Sequence[Add | Abort]:
        """What the engine has not been told yet; it is told now."""
        commands, self._commands = self._commands, []
        return commands

    def advance(self, progress: Sequence[Progress]) -> list[RequestOutput]:
        """The outputs that have grown or ended by a step; the latter are forgotten.

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
        return list(grown.values())

    def claim(
        self, is_own: Callable[[str], bool], step: Callable[[], Sequence[RequestOutput]]
    ) -> list[RequestOutput]:
        """A caller's outputs that have grown; runs a step unless there are some already.

        Args:
            is_own: Whether the caller waits for the request with an id.
            step: Returns the outputs that it has made grow.

        Returns:
            In the order of their steps, which is that of all ranks.
        """
        if not any(map(is_own, self.unclaimed)):
            self.unclaimed |= {one.request_id: one for one in step()}
        return [self.unclaimed.pop(name) for name in list(self.unclaimed) if is_own(name)]

    def _advance(self, progress: Progress) -> _Request | None:
        """The request of an engine's progress, if its outputs have grown."""
        request, completion = self._running[progress.number]
        if progress.result is not None:
            del self._running[progress.number]
            self._add_prompt_logprobs(request, progress.result)
            if progress.result.finish == "error":
                name = request.output.request_id
                _logger.error("request %s has failed: %s", name, progress.result.error)
            elif progress.result.error:
                raise RuntimeError(f"the engine refused a request: {progress.result.error}")
        if completion.finished:
            return None
        completion.advance(progress)
        if completion.finished:
            request.left -= 1
            request.output.finished = not request.left
            if progress.result is None:
                self._stop(progress.number)
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
        from absorbed_mla.serving.executor.local import Abort

        self._commands.append(Abort(number))
