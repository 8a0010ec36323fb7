"""Endpoints that trainers use, by vLLM's names: pause, sleep, cache and weights."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import create_model
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from absorbed_mla.serving.engine_control import EngineControl
from absorbed_mla.serving.server.failures import ModelFailed, ServiceStopped
from absorbed_mla.serving.server.protocol import KnownFields
from absorbed_mla.serving.server.request_fields import read_body, read_query
from absorbed_mla.serving.server.service import Service

_Handler = Callable[[Request], Awaitable[Response]]


def rl_routes(service: Service, guarded: Callable[[_Handler], _Handler]) -> list[Route]:
    """The routes.

    Args:
        service: Runs the model.
        guarded: Makes a handler ask for the API key.
    """
    control = EngineControl(service)

    async def update_weights(
        address: str, keep_cache: bool = False, rank_offset: int = 1, timeout: float = 300.0
    ) -> None:
        options = {"keep_cache": keep_cache, "rank_offset": rank_offset, "timeout": timeout}
        try:
            await control.update_weights(address, **options)
        except ServiceStopped:
            raise
        except RuntimeError as error:
            raise ModelFailed(str(error)) from error

    def sleeping(_: Any) -> dict[str, bool]:
        return {"is_sleeping": service.llm.is_sleeping}

    # Method, what is called with the query's or the body's fields, and the answer.
    routes: dict[str, tuple[str, Callable[..., Awaitable], Callable[[Any], dict]]] = {
        "/pause": ("POST", control.pause_generation, lambda _: {"status": "paused"}),
        "/resume": ("POST", control.resume_generation, lambda _: {"status": "resumed"}),
        "/is_paused": ("GET", control.is_paused, lambda paused: {"is_paused": paused}),
        "/sleep": ("POST", control.sleep, sleeping),
        "/wake_up": ("POST", control.wake_up, sleeping),
        "/is_sleeping": ("GET", control.is_sleeping, sleeping),
        "/reset_prefix_cache": ("POST", control.reset_prefix_cache, lambda x: {"success": x}),
        "/update_weights": ("POST", update_weights, lambda _: {"message": "Weights updated"}),
    }
    return [
        Route(path, guarded(_handler(call, answer, call is update_weights)), methods=[method])
        for path, (method, call, answer) in routes.items()
    ]


def _handler(call: Callable[..., Awaitable], answer: Callable, has_body: bool) -> _Handler:
    hints, parameters = typing.get_type_hints(call), inspect.signature(call).parameters
    fields: dict[str, Any] = {
        name: (hints[name], ... if one.default is one.empty else one.default)
        for name, one in parameters.items()
    }
    kind = create_model("_Fields", __base__=KnownFields, **fields)

    async def handle(request: Request) -> Response:
        # To this machine any page may send what has no JSON.
        if "origin" in request.headers:
            raise HTTPException(403, "these endpoints are not for web pages")
        given = await read_body(request, kind) if has_body else read_query(request, kind)
        try:
            return JSONResponse(answer(await call(**dict(given))))
        except (ServiceStopped, ModelFailed):
            raise
        except RuntimeError as error:
            raise HTTPException(409, str(error)) from error

    return handle
