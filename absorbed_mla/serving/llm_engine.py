"""``LLMEngine``: requests of several threads on one model, a step at a time."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.serving.output_processor import OutputProcessor
from absorbed_mla.serving.outputs import RequestOutput
from absorbed_mla.serving.prompts import EncodedPrompt, Prompt, PromptEncoder
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
        enable_lora: Whether requests may have adapters.
        live: Whether the weights are those of a training.

    Attributes:
        prompt_encoder: Makes of prompts what :meth:`add_request` takes without further work.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        end_tokens: Sequence[int],
        *,
        awake: bool,
        enable_lora: bool = False,
        live: bool = False,
    ) -> None:
        self._runner, self._live = runner, live
        # Why the model cannot run; empty: it has all weights.
        self._lacks_weights = ""
        self.tokenizer = tokenizer
        own = () if tokenizer is None else tokenizer.end_tokens
        ends, options = tuple(dict.fromkeys([*end_tokens, *own])), runner.options()
        self.prompt_encoder = PromptEncoder(tokenizer, ends, options, enable_lora)
        self._stores_prefixes = options.prefix_cache_dir is not None
        waits = options.enable_return_routed_experts or options.enable_return_indexer_topk
        self._requests = OutputProcessor(tokenizer, waits_for_results=waits)
        # Whether the model is awake, and whether only for the whole calls that run.
        self._awake, self._woken_by_call = awake, False
        self._calls: set[object] = set()
        self._lock = FairLock()

    def close(self) -> None:
        """End the processes, or free the cache of a live model; may be called twice."""
        self._runner.close()
        self._awake = False

    # Step by step.

    def add_request(
        self,
        prompt: Prompt | EncodedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue a prompt, also while others run; :meth:`step` runs it.

        Args:
            prompt: As for :meth:`LLM.generate`; or what ``prompt_encoder`` made of it and these
                parameters.
            sampling_params: None: ``SamplingParams()``.
            request_id: Of no other request that runs; None makes one.
            lora_request: Its adapter; needs ``enable_lora``.
            priority: Smaller ones come earlier, with ``scheduling_policy="priority"``.

        Returns:
            The request's id.

        Raises:
            ValueError: If it cannot run.
            RuntimeError: If the model is asleep.
        """
        params = sampling_params or SamplingParams()
        with self._exclusively():
            encoded = prompt
            if not isinstance(encoded, EncodedPrompt):
                encoded = self.prompt_encoder.encode(
                    prompt, params, lora_request=lora_request, priority=priority
                )
            return self._add(encoded, params, request_id)

    def step(self) -> list[RequestOutput]:
        """One forward pass over what runs.

        Returns:
            The requests of :meth:`add_request` whose outputs have grown or ended, also by steps
            that whole calls in other threads have run.
        """
        requests, grown = self._requests, list[RequestOutput]()
        try:
            with self._exclusively():
                grown = self._claim(lambda name: name not in requests.of_calls)
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

    def sleep(self, level: int = 1) -> None:
        """Abort all requests, forget what is cached, and free memory.

        Args:
            level: 0: free nothing. 1: free the cache's memory and, of a model that came from a
                checkpoint, move the weights from a GPU to host memory. CUDA graphs go with the
                cache; those of layers are captured again by :meth:`wake`, those of whole steps when
                one first runs. 2: also forget the weights; then :meth:`update_weights` comes before
                :meth:`wake`.

        Raises:
            ValueError: If there is no such level, or 2 is to forget weights of a live model.
        """
        self.require_sleep_level(level)
        with self._exclusively():
            if self._awake or level:
                self._runner.sleep(level)
                self._awake = self._woken_by_call = False
                self._requests.forget()
            if level == 2:
                self._lacks_weights = "sleep(level=2) has discarded the weights"

    def require_sleep_level(self, level: int) -> None:
        """Check a level as :meth:`sleep` does, without sleeping."""
        if level not in (0, 1, 2) or (self._live and level == 2):
            levels = "0 or 1 for a live model, whose weights are the training's"
            raise ValueError(
                f"level must be {levels if self._live else '0, 1 or 2'}, got {level!r}"
            )

    @property
    def is_sleeping(self) -> bool:
        """Whether the model is asleep."""
        return not self._awake

    @property
    def is_ready(self) -> bool:
        """Whether a step can run: the model is awake and has all weights."""
        return self._awake and not self._lacks_weights

    def update_weights(
        self,
        weights: Any,
        *,
        keep_cache: bool = False,
        rank_offset: int = 1,
        timeout: float = 300.0,
    ) -> None:
        """Replace all weights, between two steps; requests that run go on with the new ones.

        Also while it is asleep, where :meth:`wake` makes the cache afterwards.

        Args:
            weights: :class:`absorbed_mla.export.LiveWeights` of a model in this program, or the
                address of a :class:`absorbed_mla.export.WeightSender`, ``tcp://HOST:PORT``, whose
                ``send`` this call waits for. Values are rounded to the dtypes that the model has.
            keep_cache: Whether latents of the former weights stay in use: those of running requests
                and of the prefix cache. If not, the prefix cache is emptied, and running requests
                are computed again with the tokens that they have.
            rank_offset: The rank of this model's first process among the sender's receivers, from
                1. Processes of one model have consecutive ones.
            timeout: Seconds that it waits for the sender.

        Raises:
            ValueError: If names, shapes or dtypes are not those of this model, or nobody sends; it
                goes on with its former weights.
            RuntimeError: If the transfer fails. If weights have changed, the model generates again
                after the next update that does not fail.
        """
        if self._live:
            raise ValueError("update_weights: a live model's weights are read where they are")
        if not isinstance(weights, str) and not hasattr(weights, "shapes"):
            raise ValueError(
                f"weights must be LiveWeights or an address, got {type(weights).__name__}"
            )
        if rank_offset < 1 or not 0 < timeout < math.inf:
            raise ValueError(
                "rank_offset must be at least 1 and timeout above 0 and finite, got "
                f"{rank_offset} and {timeout}"
            )
        if keep_cache and self._stores_prefixes:
            raise ValueError("keep_cache=True needs prefix_cache_dir=None")
        with self._exclusively():
            failure = self._runner.update_weights(weights, keep_cache, rank_offset, timeout)
            if failure is None:
                self._lacks_weights = ""
                return
            if failure.refused:
                raise ValueError(failure.message)
            message = f"update_weights has failed: {failure.message}"
            if failure.changed:
                self._lacks_weights = message
            raise RuntimeError(message)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empty the prefix cache.

        Args:
            reset_running_requests: Whether running requests, which use it, are computed again with
                the tokens that they have.

        Returns:
            Whether it was emptied: not while requests run, unless they may be computed again.
        """
        with self._exclusively():
            self._require_awake()
            return self._runner.reset_prefix_cache(reset_running_requests)

    def wake(self) -> None:
        """Be ready to generate with the weights as they are now, and an empty cache.

        Raises:
            RuntimeError: If it has no weights.
        """
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

    def silence(self) -> float:
        """Seconds without a sign of life of some process of the model; does not wait for steps."""
        return self._runner.silence()

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
        return self.prompt_encoder.max_model_len

    # For whole calls.

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """No other thread does anything meanwhile, and Ctrl-C waits."""
        with interrupts_deferred(), self._lock:
            yield

    def _run(
        self, encoded: Sequence[tuple[EncodedPrompt, SamplingParams]], names: list[str]
    ) -> Iterator[RequestOutput]:
        """A whole call: the model is awake meanwhile, and none of its requests is left behind.

        Args:
            encoded: Prompts, each with its parameters.
            names: The ids of their requests are appended.
        """
        with self._whole_call():
            try:
                with self._exclusively():
                    self._woken_by_call |= not self._awake
                    self._wake()
                    for prompt, params in encoded:
                        names.append(self.add_request(prompt, params))
                        self._requests.of_calls.add(names[-1])
                missing = set(names)
                while missing:
                    with self._exclusively():
                        grown = self._claim(missing.__contains__)
                    for output in grown:
                        missing -= {output.request_id} if output.finished else set()
                        yield output
            finally:
                with self._exclusively():
                    self._requests.drop(names)

    @contextlib.contextmanager
    def _whole_call(self) -> Iterator[None]:
        """After the last one of those that run, the model sleeps again, if one has woken it."""
        call = object()
        try:
            with self._exclusively():
                self._calls.add(call)
            yield
        finally:
            with self._exclusively():
                self._calls.discard(call)
                if self._woken_by_call and not self._calls:
                    self.sleep(0)

    def _add(self, prompt: EncodedPrompt, params: SamplingParams, name: str | None) -> str:
        self._require_awake()
        if prompt.encoder is not self.prompt_encoder:
            raise ValueError("prompt must be encoded by this LLM's prompt_encoder, not another's")
        if prompt.of_engine.structured_outputs is not None:
            self._requests.set_vocabulary(self.prompt_encoder.grammars.vocabulary)
        return self._requests.add(prompt, params, name)

    def _claim(self, is_own: Callable[[str], bool]) -> list[RequestOutput]:
        """A caller's outputs that have grown; runs a step unless there are some already."""
        requests = self._requests
        if not requests.has_unclaimed(is_own):
            self._require_awake()
            requests.process(self._runner.step(requests.commands()))
        return requests.claim(is_own)

    def _wake(self) -> None:
        self._require_weights()
        if not self._awake:
            self._runner.wake()
            self._awake = True

    def _require_awake(self) -> None:
        if not self._awake:
            raise RuntimeError("the model is asleep; call wake()")
        self._require_weights()

    def _require_weights(self) -> None:
        if self._lacks_weights:
            raise RuntimeError(f"{self._lacks_weights}; call update_weights")


class FairLock:
    """A lock that threads get in the order in which they ask; its owner may take it again."""

    def __init__(self) -> None:
        self._waiting, self._held = threading.Lock(), threading.RLock()

    def __enter__(self) -> None:
        # The owner asks again where Python closes an abandoned generator meanwhile.
        if self._held._is_owned():  # type: ignore[attr-defined]
            self._held.acquire()
            return
        try:
            # Who has just released it must wait behind the thread that holds the first one.
            with self._waiting:
                self._held.acquire()
        except BaseException:
            # A second Ctrl-C, which may come when this thread has it already.
            if self._held._is_owned():  # type: ignore[attr-defined]
                self._held.release()
            raise

    def __exit__(self, *_) -> None:
        self._held.release()


class _Deferred:
    """A handler of SIGINT that calls the one before it later, and the second time at once."""

    def __init__(self, before: Callable) -> None:
        self.before = before
        self.received: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self.before(number, frame)
        self.received = number, frame


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C (SIGINT) waits until the block has ended; a second one does not.

    So that an exchange with other processes is not cut in half. In other threads than the main one,
    which get no signals, nothing happens.
    """
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not callable(before) or isinstance(before, _Deferred):
        yield
        return
    handler = _Deferred(before)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if handler.received is not None:
            before(*handler.received)
