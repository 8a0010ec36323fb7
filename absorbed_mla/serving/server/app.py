"""Routes of the server."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from absorbed_mla import __version__
from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.serving.server.chat_answer import ChatAnswer
from absorbed_mla.serving.server.chat_request import ChatRequest
from absorbed_mla.serving.server.failures import ModelFailed, ServiceStopped
from absorbed_mla.serving.server.limits import MAX_BODY_BYTES
from absorbed_mla.serving.server.metrics import CountAnswers, Metrics
from absorbed_mla.serving.server.output_parsers import OutputParsers
from absorbed_mla.serving.server.protocol import (
    Answer,
    CompletionRequest,
    GenerationRequest,
    Pieces,
    error_body,
)
from absorbed_mla.serving.server.request_fields import Bodies, read_body
from absorbed_mla.serving.server.request_stream import RequestStream, Update, require_no_failure
from absorbed_mla.serving.server.responses_answer import ResponsesAnswer, ResponsesEvents
from absorbed_mla.serving.server.responses_request import ResponsesRequest
from absorbed_mla.serving.server.rl_endpoints import rl_routes
from absorbed_mla.serving.server.service import Service
from absorbed_mla.serving.server.token_requests import DetokenizeRequest, TokenizeRequest

_REQUEST_ID = "X-Request-Id"
# Every event of a streamed answer has it.
_LONGEST_ID = 200
_NO_PARSERS = OutputParsers()
_Handler = Callable[[Request], Awaitable[Response]]
_Result = TypeVar("_Result")


def build_app(
    service: Service,
    metrics: Metrics,
    name: str,
    api_key: str | None,
    origins: Sequence[str] = (),
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    parsers: OutputParsers = _NO_PARSERS,
    loras: Mapping[str, LoRARequest] = {},
    enable_rl_endpoints: bool = False,
) -> Starlette:
    """The application.

    Args:
        service: Runs the model.
        metrics: For ``/metrics``.
        name: Of the model, as clients call it.
        api_key: That clients must send; None lets everyone in.
        origins: Of web pages that may read answers; ``"*"``: all.
        max_body_bytes: Of a request.
        parsers: Of tool calls and reasoning.
        loras: Adapters by the names that clients call them.
        enable_rl_endpoints: Whether there are those of ``rl_endpoints.py``.
    """
    routes = _Routes(service, metrics, name, parsers, loras)

    def guarded(handler: _Handler) -> _Handler:
        async def call(request: Request) -> Response:
            if api_key is not None:
                given = request.headers.get("authorization", "")
                # Starlette reads the bytes of headers as Latin-1.
                if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {api_key}".encode()):
                    raise HTTPException(401, "the API key is missing or wrong")
            return await handler(request)

        return call

    cross_origin = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[_REQUEST_ID],
    )
    app = Starlette(
        middleware=[
            Middleware(_PathsAndIds),
            Middleware(CountAnswers, metrics=metrics),
            *([cross_origin] if origins else []),
        ],
        routes=[
            Route("/health", routes.health),
            Route("/ping", routes.health, methods=["GET", "POST"]),
            Route("/version", guarded(routes.version)),
            Route("/metrics", guarded(routes.metrics)),
            Route("/v1/models", guarded(routes.models)),
            Route("/v1/models/{name:path}", guarded(routes.one_model)),
            Route("/tokenize", guarded(routes.tokens(TokenizeRequest)), methods=["POST"]),
            Route("/detokenize", guarded(routes.tokens(DetokenizeRequest)), methods=["POST"]),
            Route("/v1/completions", guarded(routes.completions), methods=["POST"]),
            Route("/v1/chat/completions", guarded(routes.chat), methods=["POST"]),
            Route("/v1/responses", guarded(routes.responses), methods=["POST"]),
            *(rl_routes(service, guarded) if enable_rl_endpoints else ()),
        ],
        exception_handlers={
            HTTPException: _http_error,
            ValueError: _errors("invalid_request_error", 400),
            ServiceStopped: _errors("server_error", 503),
            ModelFailed: _errors("server_error", 500),
            ClientDisconnect: _gone,
        },
    )
    app.state.bodies, app.state.metrics = Bodies(max_body_bytes), metrics
    metrics.paths = {route.path for route in app.routes if isinstance(route, Route)}
    return app


class _PathsAndIds:
    """Takes paths with a slash at their end, and says of each answer which request it is to."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_REQUEST_ID)
        # That of the connection, which says there if it has refused the request.
        state = scope.setdefault("state", {})
        state["request_id"] = given or uuid.uuid4().hex

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_REQUEST_ID] = state["request_id"]
            await send(message)

        path = scope["path"].rstrip("/") or "/"
        await self._app({**scope, "path": path, "state": state}, receive, with_id)


class _Routes:
    """Handlers of requests."""

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        name: str,
        parsers: OutputParsers,
        loras: Mapping[str, LoRARequest],
    ) -> None:
        self._service, self._metrics, self._name = service, metrics, name
        self._parsers = parsers
        self._loras: dict[str, LoRARequest | None] = {name: None, **loras}
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 while requests can run."""
        status = self._service.health
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """A list with the one model and its adapters."""
        data = [self._model(name) for name in self._loras]
        return JSONResponse({"object": "list", "data": data})

    async def one_model(self, request: Request) -> Response:
        """The model or an adapter, by its name."""
        name = request.path_params["name"]
        self._require_model(name)
        return JSONResponse(self._model(name))

    async def version(self, request: Request) -> Response:
        """Of this package."""
        return JSONResponse({"version": __version__})

    def tokens(self, kind: type[TokenizeRequest | DetokenizeRequest]) -> _Handler:
        """``/tokenize`` or ``/detokenize``, which do not wait for the model."""

        async def answer(request: Request) -> Response:
            body = await read_body(request, kind)
            self._require_model(body.model)
            work = self._service.tokenize(body.answer, request.state.body_bytes)
            return JSONResponse(await _unless_disconnected(request, work))

        return answer

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""
        return await self._answer(request, await read_body(request, CompletionRequest), Answer)

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        body = await read_body(request, ChatRequest)
        body.use(self._parsers)
        return await self._answer(request, body, ChatAnswer)

    async def responses(self, request: Request) -> Response:
        """``/v1/responses``."""
        body = await read_body(request, ResponsesRequest)
        body.use(self._parsers)
        return await self._answer(request, body, ResponsesAnswer)

    def _model(self, name: str) -> dict[str, str | int]:
        lora = self._loras[name]
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "absorbed_mla",
            "max_model_len": self._service.llm.max_model_len,
            **({} if lora is None else {"parent": self._name, "root": str(lora.lora_path)}),
        }

    def _require_model(self, name: str | None) -> None:
        if name is not None and name not in self._loras:
            known = " or ".join(map(repr, self._loras))
            raise HTTPException(404, f"the model is {known}, not {name!r:.200}")

    async def _answer(
        self,
        request: Request,
        body: GenerationRequest | ResponsesRequest,
        kind: Callable[..., Answer | ResponsesAnswer],
    ) -> Response:
        if len(request.state.request_id) > _LONGEST_ID:
            raise HTTPException(400, f"{_REQUEST_ID} must have at most {_LONGEST_ID} characters")
        prompts, params = body.prompts(), body.params()
        self._require_model(body.model)
        if body.request_id is not None and _REQUEST_ID not in request.headers:
            request.state.request_id = body.request_id
        tokenizer = self._service.llm.tokenizer
        name = body.model or self._name
        answer = kind(body, name, request.state.request_id, tokenizer)
        size, lora = request.state.body_bytes, self._loras[name]
        stream = self._service.submit(prompts, params, size, lora, body.priority)
        request.state.stream = stream
        with contextlib.ExitStack() as stack:
            stack.callback(stream.close)
            if not body.stream:
                done = await _unless_disconnected(request, _last(stream, len(prompts)))
                require_no_failure(done)
                requests = [update.request for update in done]
                return JSONResponse(answer.whole(requests))
            # The first news, before the head of the answer is sent: a prompt may be refused.
            first = await _unless_disconnected(request, stream.next())
            require_no_failure(first.values())
            response = _EventStream(request, stream, first, answer.pieces())
            stack.pop_all()
        return response


class _EventStream(Response):
    """An answer that is streamed as server-sent events.

    Args:
        request: That is answered.
        stream: Closed at the end, also if nothing could be sent.
        first: News that have been read.
        pieces: Makes the events.
    """

    def __init__(
        self,
        request: Request,
        stream: RequestStream,
        first: dict[int, Update],
        pieces: Pieces | ResponsesEvents,
    ) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8"})
        self._request, self._stream, self._first = request, stream, first
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Starlette's class."""
        try:
            with contextlib.suppress(ClientDisconnect):
                await _unless_disconnected(self._request, self._send(send))
        finally:
            self._stream.close()

    async def _send(self, send: Send) -> None:
        kind, head = "http.response.start", self.raw_headers
        await _write(send, {"type": kind, "status": self.status_code, "headers": head})
        body = {"type": "http.response.body", "more_body": True}
        news, end = self._first, b""
        try:
            while True:
                events = self._pieces.of(news)
                if events:
                    await _write(send, {**body, "body": events})
                require_no_failure(news.values())
                if self._stream.is_over:
                    break
                news = await self._stream.next()
            end = self._pieces.last()
        except (ServiceStopped, ModelFailed) as error:
            status = 503 if isinstance(error, ServiceStopped) else 500
            end = self._pieces.failed(str(error), status)
        await _write(send, {**body, "body": end, "more_body": False})


async def _write(send: Send, message: Message) -> None:
    """Send a message.

    Raises:
        ClientDisconnect: If there is no connection any more.
    """
    try:
        await send(message)
    # The latter is uvloop's, of a connection whose loss it has not told.
    except (OSError, RuntimeError) as error:
        raise ClientDisconnect from error


async def _last(stream: RequestStream, count: int) -> list[Update]:
    """The last updates of all prompts."""
    found: dict[int, Update] = {}
    while not stream.is_over:
        found |= await stream.next()
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


async def _http_error(request: Request, error: HTTPException) -> Response:
    kind = "authentication_error" if error.status_code == 401 else "invalid_request_error"
    return _error(error.detail, kind, error.status_code)


def _errors(kind: str, status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        return _error(str(error), kind, status)

    return answer


def _error(text: str, kind: str, status: int) -> Response:
    # Behind a load balancer another server may answer.
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse(error_body(text, kind, status), status, headers)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    # Nobody reads it; 499 is what access logs have for it.
    return Response(status_code=499)
