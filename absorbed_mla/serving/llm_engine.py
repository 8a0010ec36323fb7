"""``LLMEngine``: requests of several threads on one model, a step at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from absorbed_mla.serving.exclusive import FairLock, interrupts_deferred
from absorbed_mla.serving.llm_requests import Requests
from absorbed_mla.serving.outputs import RequestOutput
from absorbed_mla.serving.prompts import Prompt, encode
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer

if TYPE_CHECKING:
    from absorbed_mla.serving.executor.local import Runner
    from absorbed_mla.serving.statistics import Statistics


class LLMEngine:
    """The part of ``LLM`` that users call step by step, and on which its whole calls are built.

    Args:
        runner: Of the model.
        tokenizer: Of texts; None: prompts and outputs are token ids.
        end_tokens: That end the model's texts besides the tokenizer's own.
        awake: Whether the runner is.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        end_tokens: Sequence[int],
        *,
        awake: bool,
    ) -> None:
        self._runner = runner
        self.tokenizer = tokenizer
        own = () if tokenizer is None else tokenizer.end_tokens
        self._end_tokens = tuple(dict.fromkeys([*end_tokens, *own]))
        self._sizes = runner.options()
        self._requests = Requests(tokenizer)
        # Whether the model is awake, and whether only for the whole calls that run.
        self._awake, self._woken_by_call = awake, False
        self._lock = FairLock()

    def close(self) -> None:
        """End the processes, or free the cache of a live model; may be called twice."""
        self._runner.close()
        self._awake = False

    # Step by step.

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt, also while others run; :meth:`step` runs it.

        Args:
            prompt: Text or token ids.
            sampling_params: None: ``SamplingParams()``.
            request_id: Of no other request that runs; None makes one.

        Returns:
            The request's id.

        Raises:
            ValueError: If it cannot run.
            RuntimeError: If the model is asleep.
        """
        params = sampling_params or SamplingParams()
        with self._exclusively():
            tokens = encode(prompt, params, self.tokenizer, self._sizes)
            return self._add(prompt, tokens, params, request_id)

    def step(self) -> list[RequestOutput]:
        """One forward pass over what runs.

        Returns:
            The requests of :meth:`add_request` whose outputs have grown or ended, also by steps
            that whole calls in other threads have run.
        """
        requests, grown = self._requests, list[RequestOutput]()
        try:
            with self._exclusively():
                grown = requests.claim(lambda name: name not in requests.of_calls, self._step)
        except BaseException:
            # After Ctrl-C they are there for the next call.
            with self._exclusively():
                requests.unclaimed = {one.request_id: one for one in grown} | requests.unclaimed
            raise
        return grown

    def abort(self, request_id: str) -> None:
        """End a request; its outputs keep what they have. Unknown ids are ignored: it has ended."""
        with self._exclusively():
            self._requests.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has something to do or to report; whole calls do their own."""
        with self._exclusively():
            return self._requests.are_left()

    # Around training.

    def sleep(self, *, free_cache: bool = True) -> None:
        """Abort all requests, forget what is cached, and let the model be trained.

        Args:
            free_cache: Whether to free the cache's memory. CUDA graphs go with it; those of layers
                are captured again by :meth:`wake`, those of whole steps when one first runs.
        """
        with self._exclusively():
            if self._awake:
                self._runner.sleep(free_cache)
                self._awake = self._woken_by_call = False
                self._requests.forget()

    def wake(self) -> None:
        """Be ready to generate with the weights as they are now, and an empty cache."""
        with self._exclusively():
            # It stays awake after a whole call that woke it.
            self._woken_by_call = False
            self._wake()

    def statistics(self) -> Statistics:
        """Counters of the engine since it woke.

        Raises:
            RuntimeError: If the model is asleep.
        """
        with self._exclusively():
            self._require_awake()
            return self._runner.statistics()

    def check(self) -> None:
        """Check that the model can run.

        Raises:
            EngineDeadError: If one of its processes has ended.
        """
        with self._exclusively():
            self._runner.check()

    def require_no_leak(self) -> None:
        """Check, while nothing runs, that no block of the cache is lost.

        Raises:
            RuntimeError: Naming the blocks that are, or if the model is asleep.
        """
        with self._exclusively():
            self._require_awake()
            self._runner.require_no_leak()

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and what is generated after it."""
        return self._sizes.max_sequence_length

    @property
    def num_running(self) -> int:
        """Number of outputs that run or wait."""
        return self._requests.num_running

    # For whole calls.

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """No other thread does anything meanwhile, and Ctrl-C waits."""
        with interrupts_deferred(), self._lock:
            yield

    def _run(
        self, encoded: Sequence[tuple[Prompt, list[int], SamplingParams]], names: list[str]
    ) -> Iterator[RequestOutput]:
        """A whole call: the model is awake meanwhile, and none of its requests is left behind.

        Args:
            encoded: Prompts, each with its tokens and parameters.
            names: The ids of their requests are appended.
        """
        try:
            with self._exclusively():
                self._woken_by_call |= not self._awake
                self._wake()
                for one in encoded:
                    names.append(self._add(*one, None))
                    self._requests.of_calls.add(names[-1])
            missing = set(names)
            while missing:
                with self._exclusively():
                    grown = self._requests.claim(missing.__contains__, self._step)
                for output in grown:
                    missing -= {output.request_id} if output.finished else set()
                    yield output
        finally:
            with self._exclusively():
                self._requests.drop(names)
                if self._woken_by_call and not self._requests.of_calls:
                    self.sleep(free_cache=False)

    def _add(
        self, prompt: Prompt, tokens: list[int], params: SamplingParams, name: str | None
    ) -> str:
        self._require_awake()
        text = prompt if isinstance(prompt, str) else None
        ends = () if params.ignore_eos else self._end_tokens
        return self._requests.add(text, tokens, params, name, ends)

    def _step(self) -> list[RequestOutput]:
        self._require_awake()
        return self._requests.advance(self._runner.step(self._requests.commands()))

    def _wake(self) -> None:
        if not self._awake:
            self._runner.wake()
            self._awake = True

    def _require_awake(self) -> None:
        if not self._awake:
            raise RuntimeError("the model is asleep; call wake()")
