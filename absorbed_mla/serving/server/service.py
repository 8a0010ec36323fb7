"""The service: runs one ``LLM`` in a thread, for any number of asynchronous callers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.serving.llm import LLM
from absorbed_mla.serving.outputs import RequestOutput
from absorbed_mla.serving.prompts import EncodedPrompt, Prompt
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.server.failures import (
    NotReady,
    ServerBusy,
    ServiceStopped,
    ShuttingDown,
    as_refusal,
)
from absorbed_mla.serving.server.metrics import Metrics
from absorbed_mla.serving.server.request_stream import RequestStream, Update, deliver, fail

# Seconds between two checks, while nothing runs, that the model's processes are there.
_CHECK = 1.0
# Seconds that the end of the server waits for a step.
_LONGEST_STEP = 10.0
# Seconds between two looks at the engine's statistics.
_SAMPLE = 1.0
# Seconds that a step may take: kernels are compiled in the first ones.
STEP_TIMEOUT = 300.0
# Seconds that a process of the model may be silent; it beats each second, also during a step.
HEARTBEAT_TIMEOUT = 20.0
# Bytes of a request above which it has to wait for others like it, and short ones do not wait for
# it: tokens of a megabyte may take a second of a processor.
_LONG = 64 << 10
# Bytes of requests that may wait together for their tokens.
_MOST_WAITING = 256 << 20

_STOPPED, _ASLEEP = "the model has stopped", "the model is asleep"

_logger = logging.getLogger(__name__)

# Makes a prompt; called in a thread of its own.
MakePrompt = Callable[[LLM], Prompt]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Submit:
    # By the name of its request.
    prompts: dict[str, EncodedPrompt]
    params: SamplingParams
    stream: RequestStream


@dataclass(frozen=True)
class _Call:
    function: Callable[[LLM], Any]
    future: Future


class Service:
    """Owns the thread that makes all calls to a model, and two in which prompts become token ids.

    Of these one is for short requests, one for long ones: tokenizers of Hugging Face's run without
    Python's lock, and nobody may keep the model waiting.

    Args:
        llm: Used by nobody else from now on.
        metrics: Counts what happens.
        on_death: Called once, in the model's thread, if the model dies.
        step_timeout: Seconds after which a step that has not ended is a failure of the model.
        heartbeat_timeout: Seconds without a heartbeat after which a process of the model is hung.
    """

    def __init__(
        self,
        llm: LLM,
        metrics: Metrics,
        on_death: Callable[[], Any],
        *,
        step_timeout: float = STEP_TIMEOUT,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
    ) -> None:
        self.llm = llm
        self._metrics, self._on_death = metrics, on_death
        self._commands: queue.SimpleQueue[_Submit | _Call | None] = queue.SimpleQueue()
        # By the name of a request, with the number of its prompt.
        self._streams: dict[str, tuple[RequestStream, int]] = {}
        self._names = itertools.count()
        self._stopped: ServiceStopped | None = None
        self._drains = False
        # While it is paused: that it is, whether what runs waits, too, and what has come.
        self._paused = self._frozen = False
        self._held: list[_Submit] = []
        # What the call that runs will return.
        self._called: Future[Any] = Future()
        self._step_timeout, self._heartbeat_timeout = step_timeout, heartbeat_timeout
        # When the step that runs began, and when statistics were last read.
        self._step_began: float | None = None
        self._sampled = -_SAMPLE
        self._lock = threading.Lock()
        self._short, self._long = (
            ThreadPoolExecutor(1, thread_name_prefix=f"{name}-prompts")
            for name in ("short", "long")
        )
        # Bytes of requests that wait for their tokens.
        self._waiting_bytes = 0
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Begin to run requests."""
        self._thread.start()

    def end(self) -> None:
        """Fail all requests, and all that follow, after the step or call that runs."""
        self._commands.put(None)
        # It may wait for somebody else.
        with contextlib.suppress(InvalidStateError):
            self._called.set_exception(ShuttingDown())

    def stop(self) -> None:
        """:meth:`end`, and wait for the thread; not for ever, because a step may hang."""
        self.end()
        self._thread.join(_LONGEST_STEP)

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        self._drains = True

    @property
    def is_alive(self) -> bool:
        """Whether the model runs."""
        return self._stopped is None

    @property
    def health(self) -> str:
        """``"ok"`` if requests can run, ``"draining"``, ``"hung"`` or ``"stopped"``."""
        began = self._step_began
        if not self.is_alive:
            return "stopped"
        if began is not None and time.monotonic() - began > self._step_timeout:
            return "hung"
        if self.llm.silence() > self._heartbeat_timeout:
            return "hung"
        return "draining" if self._drains else "ok"

    def submit(
        self,
        prompts: Sequence[MakePrompt],
        params: SamplingParams,
        size: int = 0,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> RequestStream:
        """Run prompts, for a caller in a running loop.

        Args:
            prompts: Queued together; if one is refused, none runs.
            params: Of each of them.
            size: Bytes of the request.
            lora_request: Adapter of each prompt.
            priority: Of each of them.

        Returns:
            For their updates; to be closed.

        Raises:
            ServiceStopped: If the model has stopped, or too much waits for it.
        """
        names = [f"request-{next(self._names)}" for _ in prompts]
        stream = RequestStream(names, self._abort)

        def encode() -> None:
            if stream.is_over:
                return
            try:
                self._require_running()
                encoded = partial(
                    self.llm.prompt_encoder.encode,
                    params=params,
                    lora_request=lora_request,
                    priority=priority,
                )
                made = [encoded(make(self.llm)) for make in prompts]
                self._queue(_Submit(dict(zip(names, made)), params, stream))
            except ServiceStopped as error:
                fail(stream, error)
            except Exception as error:
                fail(stream, as_refusal(error))

        self._in_thread(size, encode)
        return stream

    async def tokenize(self, function: Callable[[LLM], _Result], size: int) -> _Result:
        """The result of a function that uses the tokenizer.

        Args:
            function: Called in another thread.
            size: Bytes of the request.

        Raises:
            ValueError: If it fails.
            ServiceStopped: If the model has stopped, or too much waits for it.
        """
        try:
            return await asyncio.wrap_future(self._in_thread(size, lambda: function(self.llm)))
        except ServiceStopped:
            raise
        except Exception as error:
            raise as_refusal(error) from error

    async def call(self, function: Callable[[LLM], _Result]) -> _Result:
        """The result of a function that the model's thread calls between two steps.

        Raises:
            Exception: What it raises.
            ServiceStopped: If the model has stopped, or ends meanwhile.
        """
        future: Future[_Result] = Future()
        if self._drains:
            raise ShuttingDown
        self._queue(_Call(function, future))
        return await asyncio.wrap_future(future)

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait for :meth:`resume`."""
        return self._paused

    # In the model's thread, by :meth:`call`.

    def pause(self, mode: str) -> None:
        """Let new requests wait; those that run go on, wait as well or are aborted.

        Args:
            mode: ``"wait"``, ``"keep"`` or ``"abort"``.
        """
        self._paused, self._frozen = True, mode == "keep"
        if mode == "abort":
            _abort_all(self.llm, self._streams)

    def resume(self) -> None:
        """Run what waits."""
        self._paused = self._frozen = False
        held, self._held = self._held, []
        for command in held:
            self._submit(command)

    def can_step(self) -> bool:
        """Whether there is something to run that neither waits nor lacks the model."""
        ready = self.llm.is_ready and not self._frozen
        return ready and self.llm.has_unfinished_requests()

    def sleep(self, level: int) -> None:
        """As :meth:`LLM.sleep`; what still runs fails."""
        self._sampled = -_SAMPLE
        self._sample()
        self.llm.sleep(level)
        for stream, _ in self._streams.values():
            fail(stream, NotReady(_ASLEEP))
        self._streams.clear()
        self._metrics.stop("abort")

    def _in_thread(self, size: int, function: Callable[[], Any]) -> Future:
        with self._lock:
            self._require_running()
            if self._drains:
                raise ShuttingDown
            if self._waiting_bytes + size > _MOST_WAITING:
                raise ServerBusy
            self._waiting_bytes += size
            future = (self._long if size > _LONG else self._short).submit(function)
        future.add_done_callback(lambda _: self._leave(size))
        return future

    def _leave(self, size: int) -> None:
        with self._lock:
            self._waiting_bytes -= size

    def _queue(self, command: _Submit | _Call) -> None:
        with self._lock:
            self._require_running()
            self._commands.put(command)

    def _require_running(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def _abort(self, names: list[str]) -> None:
        self._commands.put(_Call(partial(_abort_all, names=names), Future()))

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self.can_step():
                    self._step_began = time.monotonic()
                    outputs = self.llm.step()
                    # A client that has its answer finds it among the metrics.
                    self._metrics.observe(outputs)
                    self._publish(outputs)
                    self._sample()
                    self._step_began = None
            self._end(ShuttingDown())
        except Exception as error:
            # It may have paths and lines of a log, which are not for clients.
            _logger.critical("the model has stopped: %s", error)
            self._end(ServiceStopped(_STOPPED))
            self._on_death()

    def _sample(self) -> None:
        """Read the engine's statistics, now and then."""
        now = time.monotonic()
        if now - self._sampled >= _SAMPLE and self.llm.is_ready:
            # Of all ranks, which may hang as in a step.
            self._step_began = now
            self._metrics.engine, self._sampled = self.llm.statistics(), now
            self._step_began = None

    def _take_commands(self) -> bool:
        """Carry out what callers asked for, waiting if nothing runs; False ends the thread."""
        wait = not self.can_step()
        while True:
            try:
                command = self._commands.get(block=wait, timeout=_CHECK if wait else None)
            except queue.Empty:
                if wait:
                    self.llm.check()
                    self._sample()
                return True
            wait = False
            if command is None:
                return False
            if isinstance(command, _Call):
                self._carry_out(command)
            else:
                self._submit(command)

    def _carry_out(self, call: _Call) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        self._called = call.future
        failure: Exception | None = None
        try:
            result = call.function(self.llm)
        except Exception as error:
            failure = ServiceStopped(_STOPPED)
            # Its processes may have ended of it.
            self.llm.check()
            failure = error
        finally:
            # Unless the caller has heard of the server's end.
            with contextlib.suppress(InvalidStateError):
                if failure is None:
                    call.future.set_result(result)
                else:
                    call.future.set_exception(failure)

    def _submit(self, command: _Submit) -> None:
        """Queue prompts, unless their caller has left."""
        if command.stream.is_over:
            return
        if self._paused:
            self._held.append(command)
            return
        try:
            if not self.llm.is_ready:
                raise NotReady(_ASLEEP if self.llm.is_sleeping else "the model lacks weights")
            self._add_all(command)
        except NotReady as error:
            fail(command.stream, error)
        except Exception as error:
            fail(command.stream, as_refusal(error))
        else:
            for i, name in enumerate(command.prompts):
                self._streams[name] = command.stream, i
                self._metrics.begin(name, command.stream.began, command.params.n)
                # While its tokens were sought.
                if command.stream.is_aborted:
                    self.llm.abort(name)

    def _add_all(self, command: _Submit) -> None:
        """Add all prompts of a call to the model, or none."""
        added: list[str] = []
        try:
            for name, prompt in command.prompts.items():
                self.llm.add_request(prompt, command.params, name)
                added.append(name)
        except BaseException:
            for name in added:
                self.llm.abort(name)
            raise

    def _publish(self, outputs: Sequence[RequestOutput]) -> None:
        """Give the callers what a step has made, all of it at once."""
        news = []
        for output in outputs:
            name, finished = output.request_id, output.finished
            found = self._streams.pop(name, None) if finished else self._streams.get(name)
            if found is not None:
                news.append((*found, Update.of(output)))
        deliver(news)

    def _end(self, reason: ServiceStopped) -> None:
        """Tell every caller, also those whose requests were never taken."""
        with self._lock:
            self._stopped = reason
            for one in (self._short, self._long):
                one.shutdown(wait=False)
            while not self._commands.empty():
                command = self._commands.get()
                if isinstance(command, _Submit):
                    fail(command.stream, reason)
                elif isinstance(command, _Call) and command.future.set_running_or_notify_cancel():
                    command.future.set_exception(reason)
        for stream in (one.stream for one in self._held):
            fail(stream, reason)
        for stream, _ in self._streams.values():
            fail(stream, reason)
        self._streams.clear()
        self._metrics.stop(reason.finish_reason)


def _abort_all(llm: LLM, names: Iterable[str]) -> None:
    for name in names:
        llm.abort(name)
