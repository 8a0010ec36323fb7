"""Runs one ``LLM`` in a thread, for any number of asynchronous callers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from absorbed_mla.generation.sampling import SamplingParams
from absorbed_mla.llm.llm import LLM, Prompt
from absorbed_mla.llm.outputs import PositionLogprobs, RequestOutput
from absorbed_mla.llm.server.metrics import Metrics

# Seconds between two checks, while nothing runs, that the model's processes are there.
_CHECK = 1.0
# Seconds that the end of the server waits for a step.
_LONGEST_STEP = 10.0


# Makes a prompt; called in the model's thread, which owns the tokenizer.
MakePrompt = Callable[[LLM], Prompt]


class ServiceStopped(RuntimeError):
    """The model has stopped: its processes have ended, or the server is shutting down."""


@dataclass(frozen=True)
class Snapshot:
    """An output at one moment; the lists are the growing ones, cut by ``num_tokens`` when read.

    Attributes:
        text: So far.
        num_tokens: Generated so far.
        logprobs: Of at least these tokens; None unless asked for.
        finish_reason: As in ``CompletionOutput``.
    """

    text: str
    num_tokens: int
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None


@dataclass(frozen=True)
class Update:
    """All outputs of a request at one moment."""

    request: RequestOutput
    outputs: list[Snapshot]
    finished: bool


class Ticket:
    """What an asynchronous caller waits for: the prompts of one call.

    The newest update of a prompt replaces one that was not read, so that a slow reader costs no
    memory.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()
        self._updates: dict[int, Update] = {}
        self._error: Exception | None = None

    def publish(self, i: int, update: Update) -> None:
        """Called by the model's thread: prompt ``i`` has grown."""
        self._call(self._updates.__setitem__, i, update)

    def fail(self, error: Exception) -> None:
        """Called by the model's thread: all prompts have failed."""
        self._call(setattr, self, "_error", error)

    async def next(self) -> dict[int, Update]:
        """Wait for news of some prompts.

        Raises:
            ValueError: If one of the prompts cannot run.
            ServiceStopped: If the model has stopped.
        """
        await self._event.wait()
        self._event.clear()
        if self._error is not None:
            raise self._error
        found = self._updates.copy()
        self._updates.clear()
        return found

    def _call(self, change: Callable[..., Any], *args: Any) -> None:
        """Make a change in the loop's thread, which is the only one that reads."""

        def run() -> None:
            change(*args)
            self._event.set()

        # The loop is closed when the server has ended before its model.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(run)


@dataclass(frozen=True)
class _Submit:
    # By the name of its request.
    prompts: dict[str, MakePrompt]
    params: SamplingParams
    ticket: Ticket


@dataclass(frozen=True)
class _Abort:
    names: list[str]


class Service:
    """Owns the thread that makes all calls to a model.

    Args:
        llm: Used by nobody else from now on.
        metrics: Counts what happens.
        on_death: Called once, in the model's thread, if the model dies.
    """

    def __init__(self, llm: LLM, metrics: Metrics, on_death: Callable[[], Any]) -> None:
        self.llm = llm
        self._metrics, self._on_death = metrics, on_death
        self._commands: queue.SimpleQueue[_Submit | _Abort | None] = queue.SimpleQueue()
        # By the name of a request, with the number of its prompt.
        self._tickets: dict[str, tuple[Ticket, int]] = {}
        self._names = itertools.count()
        self._stopped: ServiceStopped | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Begin to run requests."""
        self._thread.start()

    def end(self) -> None:
        """Fail all requests, and all that follow, after the step that runs."""
        self._commands.put(None)

    def stop(self) -> None:
        """:meth:`end`, and wait for the thread; not for ever, because a step may hang."""
        self.end()
        self._thread.join(_LONGEST_STEP)

    @property
    def is_alive(self) -> bool:
        """Whether requests can run."""
        return self._stopped is None

    async def updates(
        self, prompts: Sequence[MakePrompt], params: SamplingParams
    ) -> AsyncGenerator[tuple[int, Update], None]:
        """Run prompts; the caller that leaves early aborts them.

        Args:
            prompts: Queued together; if one is refused, none runs.
            params: Of each of them.

        Yields:
            The number of a prompt, and what it has so far.

        Raises:
            ValueError: If one of the prompts cannot run, before the first is yielded.
            ServiceStopped: If the model has stopped.
        """
        names = [f"request-{next(self._names)}" for _ in prompts]
        ticket = Ticket(asyncio.get_running_loop())
        with self._lock:
            if self._stopped is not None:
                raise self._stopped
            self._commands.put(_Submit(dict(zip(names, prompts)), params, ticket))
        running = set(range(len(names)))
        try:
            while running:
                for i, update in (await ticket.next()).items():
                    if update.finished:
                        running.remove(i)
                    yield i, update
        finally:
            if running:
                self._commands.put(_Abort([names[i] for i in running]))

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self.llm.has_unfinished_requests():
                    for output in self.llm.step():
                        self._publish(output)
                    self._metrics.observe_engine(self.llm)
            self._end(ServiceStopped("the server is shutting down"))
        except Exception as error:
            self._end(ServiceStopped(f"the model has stopped: {error}"))
            self._on_death()

    def _take_commands(self) -> bool:
        """Carry out what callers asked for, waiting if nothing runs; False ends the thread."""
        wait = not self.llm.has_unfinished_requests()
        while True:
            try:
                command = self._commands.get(block=wait, timeout=_CHECK if wait else None)
            except queue.Empty:
                if wait:
                    self.llm.check()
                return True
            wait = False
            if command is None:
                return False
            if isinstance(command, _Abort):
                for name in command.names:
                    self._tickets.pop(name, None)
                    self.llm.abort(name)
                continue
            self._submit(command)

    def _submit(self, command: _Submit) -> None:
        """Queue prompts; whatever one does to tokenizer or template, others run on."""
        try:
            self._add_all(command)
        except ValueError as error:
            command.ticket.fail(error)
        except Exception as error:
            reason = f"the prompt cannot be tokenized: {type(error).__name__}: {error}"
            command.ticket.fail(ValueError(reason))
        else:
            for i, name in enumerate(command.prompts):
                self._tickets[name] = command.ticket, i
                self._metrics.begin(name)

    def _add_all(self, command: _Submit) -> None:
        """Add all prompts of a call to the model, or none."""
        prompts = {name: make(self.llm) for name, make in command.prompts.items()}
        added: list[str] = []
        try:
            for name, prompt in prompts.items():
                self.llm.add_request(prompt, command.params, name)
                added.append(name)
        except BaseException:
            for name in added:
                self.llm.abort(name)
            raise

    def _publish(self, output: RequestOutput) -> None:
        self._metrics.observe(output)
        found = self._tickets.get(output.request_id)
        if output.finished:
            self._tickets.pop(output.request_id, None)
        if found is None:
            return
        snapshots = [
            Snapshot(one.text, len(one.token_ids), one.logprobs, one.finish_reason)
            for one in output.outputs
        ]
        ticket, i = found
        ticket.publish(i, Update(output, snapshots, output.finished))

    def _end(self, reason: ServiceStopped) -> None:
        """Tell every caller, also those whose requests were never taken."""
        with self._lock:
            self._stopped = reason
            while not self._commands.empty():
                command = self._commands.get()
                if isinstance(command, _Submit):
                    command.ticket.fail(reason)
        for ticket, _ in self._tickets.values():
            ticket.fail(reason)
        self._tickets.clear()
