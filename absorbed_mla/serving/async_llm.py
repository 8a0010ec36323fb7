"""``AsyncLLM``: streams of outputs for the tasks of an event loop.

async with AsyncLLM("DeepSeek-V2-Lite") as llm:
    async for output in llm.generate("The capital of France is", request_id="1"):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.serving.engine_control import EngineControl
from absorbed_mla.serving.llm import LLM, Prompt
from absorbed_mla.serving.outputs import CompletionOutput, RequestOutput
from absorbed_mla.serving.sampling.parameters import SamplingParams

if TYPE_CHECKING:
    from absorbed_mla.serving.server.request_stream import RequestStream, Snapshot, Update


class AsyncLLM(EngineControl):
    """Generates text for any number of tasks at a time, whose requests run together.

    It is the server's engine: a thread of its own has the model.

    Args:
        model, tokenizer, options: As for :class:`LLM`.

    Raises:
        ValueError: If checkpoint, options and machine do not fit each other.
    """

    def __init__(
        self, model: str | Path, *, tokenizer: str | Path | Any | None = None, **options: Any
    ) -> None:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(
                "AsyncLLM starts the processes of its model, got torchrun's: their calls must come "
                "in one order"
            )
        self._begin(_without_loop(partial(LLM, model, tokenizer=tokenizer, **options)))

    @classmethod
    def from_llm(cls, llm: LLM) -> AsyncLLM:
        """Around an ``LLM``, also of a live model; nobody else uses it from now on."""
        made = cls.__new__(cls)
        made._begin(llm)
        return made

    def _begin(self, llm: LLM) -> None:
        try:
            from absorbed_mla.serving.server.service import Metrics, Service
        except ImportError as error:
            llm.close()
            raise ValueError(
                f"{error.name} is missing: pip install 'absorbed-mla[serve]'"
            ) from error
        _without_loop(llm.wake)
        super().__init__(Service(llm, Metrics(), lambda: None))
        self._llm = llm
        self._names = itertools.count()
        # By request_id.
        self._streams: dict[str, RequestStream] = {}
        self._service.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Fail what runs and end the processes, or free the cache of a live model."""
        self._service.stop()
        self._llm.close()

    async def get_tokenizer(self) -> Any:
        """As :meth:`LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Generate for one prompt; leaving the loop, or cancelling its task, aborts.

        Args:
            prompt: As one of :meth:`LLM.generate`.
            sampling_params: None: ``SamplingParams()``.
            request_id: Of no other request that runs; None makes one.
            lora_request: Its adapter; needs ``enable_lora``.
            priority: Smaller ones come earlier, with ``scheduling_policy="priority"``.

        Yields:
            All that there is so far, as often as the caller asks and it has grown; the last one is
            ``finished``.

        Raises:
            ValueError: If it cannot run.
            RuntimeError: If the model has failed or was closed.
        """
        name = self._new_name() if request_id is None else request_id
        if name in self._streams:
            raise ValueError(f"request_id {name!r} is that of a request that runs")
        params = sampling_params or SamplingParams()
        stream = self._service.submit(
            [lambda _: prompt], params, lora_request=lora_request, priority=priority
        )
        self._streams[name] = stream
        try:
            while not stream.is_over:
                for update in (await stream.next()).values():
                    yield _output_of(update, name)
        finally:
            del self._streams[name]
            stream.close()

    def _new_name(self) -> str:
        names = (f"request-{number}" for number in self._names)
        return next(name for name in names if name not in self._streams)

    async def abort(self, request_id: str) -> None:
        """End a request, whose last output says ``"abort"``; unknown ids are ignored."""
        if request_id in self._streams:
            self._streams[request_id].abort()


def _output_of(update: Update, name: str) -> RequestOutput:
    """What a request had at the update; its own output goes on to grow, in another thread."""
    pairs = zip(update.request.outputs, update.outputs)
    outputs = [_completion_of(one, then) for one, then in pairs]
    return replace(update.request, request_id=name, outputs=outputs, finished=update.finished)


def _completion_of(one: CompletionOutput, then: Snapshot) -> CompletionOutput:
    count, logprobs = then.num_tokens, then.logprobs
    made = replace(
        one,
        text=then.text,
        token_ids=one.token_ids[:count],
        logprobs=None if logprobs is None else logprobs[:count],
        finish_reason=then.finish_reason,
    )
    if then.finish_reason is None:
        made.stop_reason = made.error = None
        if made.token_logprobs is not None:
            made.cumulative_logprob = sum(made.token_logprobs)
    return made


def _without_loop(function: Callable[[], Any]) -> Any:
    """Its result, from a thread: an engine would run its coroutines in the loop it is made in."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()
