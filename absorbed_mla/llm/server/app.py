"""Routes of the server."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from absorbed_mla.generation.sampling import SamplingParams
from absorbed_mla.llm.outputs import RequestOutput
from absorbed_mla.llm.server.metrics import Metrics
from absorbed_mla.llm.server.protocol import (
    Answer,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    error_body,
)
from absorbed_mla.llm.server.service import MakePrompt, Service, ServiceStopped, Snapshot, Update

# A prompt of the longest models takes about a megabyte.
_MAX_BODY_BYTES = 16 << 20
_Body = TypeVar("_Body", bound=BaseModel)
# (prompt, its update)
_Updates = AsyncGenerator[tuple[int, Update], None]
_Result = TypeVar("_Result")


def build_app(service: Service, metrics: Metrics, name: str, api_key: str | None) -> Starlette:
    """The application.

    Args:
        service: Runs the model.
        metrics: For ``/metrics``.
        name: Of the model, as clients call it.
        api_key: That clients must send; None lets everyone in.
    """
    routes = _Routes(service, metrics, name)

    def guarded(handler: Callable[[Request], Awaitable[Response]]):
        async def call(request: Request) -> Response:
            if api_key is not None:
                given = request.headers.get("authorization", "")
                # Starlette reads the bytes of headers as Latin-1.
                if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {api_key}".encode()):
                    raise HTTPException(401, "the API key is missing or wrong")
            return await handler(request)

        return call

    return Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/metrics", guarded(routes.metrics)),
            Route("/v1/models", guarded(routes.models)),
            Route("/v1/completions", guarded(routes.completions), methods=["POST"]),
            Route("/v1/chat/completions", guarded(routes.chat), methods=["POST"]),
        ],
        exception_handlers={
            HTTPException: _http_error,
            ValueError: _bad_request,
            ServiceStopped: _stopped,
            ClientDisconnect: _gone,
        },
    )


class _Routes:
    """Handlers of requests."""

    def __init__(self, service: Service, metrics: Metrics, name: str) -> None:
        self._service, self._metrics, self._name = service, metrics, name

    async def health(self, request: Request) -> Response:
        """200 while the model can run."""
        alive = self._service.is_alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """The one model."""
        length = self._service.llm.max_model_len
        model = {"id": self._name, "object": "model", "owned_by": "absorbed_mla"}
        return JSONResponse({"object": "list", "data": [{**model, "max_model_len": length}]})

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""
        body = await _read(request, CompletionRequest)
        prompts = [lambda llm, one=one: one for one in body.prompts()]
        return await self._answer(request, body, prompts, body.params(), "text_completion")

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        body = await _read(request, ChatRequest)
        return await self._answer(request, body, [body.prompt], body.params(), "chat.completion")

    async def _answer(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[MakePrompt],
        params: SamplingParams,
        kind: str,
    ) -> Response:
        if body.model not in (None, self._name):
            raise HTTPException(404, f"the model is {self._name!r}, not {body.model!r}")
        answer = Answer(kind, self._name)
        updates = self._service.updates(prompts, params)
        if not body.stream:
            async with contextlib.aclosing(updates):
                done = await _unless_disconnected(request, _last(updates, len(prompts)))
            return JSONResponse(answer.whole(done))
        # The first update, before the head of the answer is sent: a prompt may be refused.
        try:
            first = await _unless_disconnected(request, anext(updates))
        except BaseException:
            await updates.aclose()
            raise
        return _EventStream(_events(answer, first, updates, params.n, body.with_usage), updates)


class _EventStream(StreamingResponse):
    """A streamed answer; updates end with it, also if nothing could be sent.

    Args:
        events: Server-sent events.
        updates: The updates that they are made of.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], updates: _Updates) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events, self._updates = events, updates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Starlette's class."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._updates.aclose()


async def _read(request: Request, kind: type[_Body]) -> _Body:
    """The body of a request.

    Raises:
        HTTPException: If it is too large.
        ValueError: If it is no JSON of this kind, naming each field that is wrong.
    """
    too_large = HTTPException(413, f"the body must have at most {_MAX_BODY_BYTES} bytes")
    # A number: the HTTP parser refuses others.
    if int(request.headers.get("content-length", 0)) > _MAX_BODY_BYTES:
        raise too_large
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MAX_BODY_BYTES:
            raise too_large
    try:
        return kind.model_validate_json(bytes(content))
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in error.errors()
        ]
        raise ValueError("; ".join(problems)) from error


async def _last(updates: _Updates, count: int) -> list[RequestOutput]:
    """The outputs of all prompts at their ends."""
    found: dict[int, RequestOutput] = {}
    async for i, update in updates:
        found[i] = update.request
    return [found[i] for i in range(count)]


async def _unless_disconnected(request: Request, work: Awaitable[_Result]) -> _Result:
    """The result of ``work``, which is cancelled if the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _events(
    answer: Answer, first: tuple[int, Update], updates: _Updates, n: int, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a streamed answer."""
    sent: dict[int, Snapshot] = {}
    requests: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(updates):
        try:
            async for i, update in _with_first(first, updates):
                requests[i] = update.request
                for j, now in enumerate(update.outputs):
                    before = sent.get(i * n + j)
                    if now != before:
                        sent[i * n + j] = now
                        yield _event(answer.piece(i * n + j, before, now))
        except ServiceStopped as error:
            yield _event(error_body(str(error), "server_error", 503))
            return
        if with_usage:
            yield _event(answer.last_piece(list(requests.values())))
        yield b"data: [DONE]\n\n"


async def _with_first(first: tuple[int, Update], rest: _Updates) -> _Updates:
    yield first
    async for one in rest:
        yield one


def _event(content: dict) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


async def _http_error(request: Request, error: HTTPException) -> Response:
    kind = "authentication_error" if error.status_code == 401 else "invalid_request_error"
    return JSONResponse(error_body(error.detail, kind, error.status_code), error.status_code)


async def _bad_request(request: Request, error: ValueError) -> Response:
    return JSONResponse(error_body(str(error), "invalid_request_error", 400), 400)


async def _stopped(request: Request, error: ServiceStopped) -> Response:
    return JSONResponse(error_body(str(error), "server_error", 503), 503)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    # Nobody reads it; 499 is what access logs have for it.
    return Response(status_code=499)
