"""The request stream: what the prompts of one call have so far, between model and event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from absorbed_mla.serving.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from absorbed_mla.serving.server.failures import ModelFailed


class Snapshot(NamedTuple):
    """An output at one moment; the lists are the growing ones, cut by ``num_tokens`` when read.

    Attributes:
        text: So far.
        num_tokens: Generated so far.
        logprobs: Of at least these tokens; None unless asked for.
        finish_reason, stop_reason, token_ids: As in ``CompletionOutput``.
    """

    text: str
    num_tokens: int
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int]

    @classmethod
    def of(cls, one: CompletionOutput) -> Snapshot:
        """An output as it is."""
        count, ends = len(one.token_ids), (one.finish_reason, one.stop_reason)
        return cls(one.text, count, one.logprobs, *ends, one.token_ids)


class Update(NamedTuple):
    """All outputs of a request at one moment."""

    request: RequestOutput
    outputs: list[Snapshot]
    finished: bool

    @classmethod
    def of(cls, request: RequestOutput) -> Update:
        """A request as it is."""
        return cls(request, list(map(Snapshot.of, request.outputs)), request.finished)


class RequestStream:
    """The prompts of one call, and what they have so far. All methods are for the loop's thread.

    The newest update of a prompt replaces one that was not read, so that a slow reader costs no
    memory.

    Args:
        names: Of the requests, one for each prompt.
        abort: Called with the names of the requests that still run when the caller leaves.

    Attributes:
        loop: That it was made in.
        is_aborted: Whether its requests are to end as soon as they have begun.
        error: Why all prompts have failed, or None.
        latest: The newest update of each prompt that has any.
        began, first_token: When it was made, and when the first token came or None; of
            ``time.monotonic``.
    """

    def __init__(self, names: Sequence[str], abort: Callable[[list[str]], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._names, self._abort = names, abort
        self.is_aborted = False
        self._running = set(range(len(names)))
        self._updates: dict[int, Update] = {}
        self.error: Exception | None = None
        self.latest: dict[int, Update] = {}
        self.began = time.monotonic()
        self.first_token: float | None = None
        # Of the caller, while there is nothing to read.
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the last update of every prompt has been read."""
        return not self._running

    def put(self, i: int, update: Update) -> None:
        """Prompt ``i`` has grown."""
        self._updates[i] = self.latest[i] = update
        if self.first_token is None and any(one.num_tokens for one in update.outputs):
            self.first_token = time.monotonic()
        self._wake()

    def fail(self, error: Exception) -> None:
        """All prompts have failed."""
        self.error = error
        self._wake()

    async def next(self) -> dict[int, Update]:
        """Wait for news of some prompts; for one caller at a time, who ends when it ``is_over``.

        Raises:
            ValueError: If one of the prompts cannot run.
            ServiceStopped: If the model has stopped.
        """
        if not self._updates and self.error is None:
            self._waiter = self.loop.create_future()
            await self._waiter
        if self.error is not None:
            raise self.error
        found, self._updates = self._updates, {}
        self._running.difference_update(i for i, one in found.items() if one.finished)
        return found

    def abort(self) -> None:
        """Abort what runs, or is to run; its last updates say so."""
        self.is_aborted = True
        if self._running:
            self._abort([self._names[i] for i in self._running])

    def figures(self) -> dict[str, int | float | str | None]:
        """Numbers of all prompts together, and why they have ended; nothing of their texts."""
        now, updates = time.monotonic(), self.latest.values()
        requests = [update.request for update in updates]
        outputs = [one for update in updates for one in update.outputs]
        left = "abort" if self.error is None else getattr(self.error, "finish_reason", "error")
        starts = [one.first_scheduled_time for one in requests if one.first_scheduled_time]
        # The clock of the steps counts from the epoch.
        queued = min(starts) - (time.time() - now) - self.began if starts else None
        first = self.first_token
        ends = ",".join(sorted({one.finish_reason or left for one in outputs}))
        return {
            "prompt_tokens": sum(len(one.prompt_token_ids) for one in requests),
            "cached_tokens": sum(one.num_cached_tokens or 0 for one in requests),
            "completion_tokens": sum(one.num_tokens for one in outputs),
            "queue_seconds": None if queued is None else round(max(queued, 0.0), 4),
            "ttft_seconds": None if first is None else round(first - self.began, 4),
            "total_seconds": round(now - self.began, 4),
            "finish_reason": ends or left,
        }

    def close(self) -> None:
        """The caller leaves: abort what runs. May be called twice."""
        self.abort()
        self._running.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def require_no_failure(updates: Iterable[Update]) -> None:
    """Check that no output has ended because the model failed.

    Raises:
        ModelFailed: If one has.
    """
    for update in updates:
        # Outputs may have grown since the update.
        for output, then in zip(update.request.outputs, update.outputs):
            if then.finish_reason == "error":
                raise ModelFailed(output.error)


def deliver(news: Iterable[tuple[RequestStream, int, Update]]) -> None:
    """Give streams the updates of their prompts, from another thread: each loop wakes up once."""
    of_loops: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, int, Update]]] = {}
    for one in news:
        of_loops.setdefault(one[0].loop, []).append(one)
    for loop, its in of_loops.items():
        _call(loop, _put_all, its)


def fail(stream: RequestStream, error: Exception) -> None:
    """Let all prompts of a stream fail, from another thread."""
    _call(stream.loop, stream.fail, error)


def _put_all(news: Sequence[tuple[RequestStream, int, Update]]) -> None:
    for stream, i, update in news:
        stream.put(i, update)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    """Call a function in a loop's thread."""
    # The loop is closed when the server has ended before its model.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)
