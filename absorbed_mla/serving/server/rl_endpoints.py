"""Endpoints that trainers use, by vLLM's names: pause, sleep, cache and weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from absorbed_mla.serving.engine_control import EngineControl
from absorbed_mla.serving.server.protocol import KnownFields
from absorbed_mla.serving.server.request_fields import read_body, read_query
from absorbed_mla.serving.server.service import ModelFailed, Service, ServiceStopped

_Handler = Callable[[Request], Awaitable[Response]]


class _Pause(KnownFields):
    mode: str = "abort"
    clear_cache: bool = True


class _Sleep(KnownFields):
    level: int = 1
    mode: str = "abort"


class _WakeUp(KnownFields):
    tags: list[str] | None = None


class _ResetPrefixCache(KnownFields):
    reset_running_requests: bool = False


class _UpdateWeights(KnownFields):
    address: str
    keep_cache: bool = False
    rank_offset: int = Field(default=1, ge=1)
    timeout: float = Field(default=300.0, gt=0, allow_inf_nan=False)


def rl_routes(service: Service, guarded: Callable[[_Handler], _Handler]) -> list[Route]:
    """The routes.

    Args:
        service: Runs the model.
        guarded: Makes a handler ask for the API key.
    """
    control = EngineControl(service)

    def asked(kind: type[KnownFields], call: Callable[..., Awaitable], say: Callable) -> _Handler:
        async def answer(request: Request) -> Response:
            _require_no_page(request)
            try:
                result = await call(**dict(read_query(request, kind)))
            except ServiceStopped:
                raise
            except RuntimeError as error:
                raise HTTPException(409, str(error)) from error
            return JSONResponse(say(result))

        return guarded(answer)

    async def update_weights(request: Request) -> Response:
        _require_no_page(request)
        body = dict(await read_body(request, _UpdateWeights))
        try:
            await control.update_weights(body.pop("address"), **body)
        except ServiceStopped:
            raise
        except RuntimeError as error:
            raise ModelFailed(str(error)) from error
        return JSONResponse({"message": "Weights updated"})

    def sleeping(_: Any) -> dict[str, bool]:
        return {"is_sleeping": service.llm.is_sleeping}

    paused, resumed = {"status": "paused"}, {"status": "resumed"}
    posts = {
        "/pause": asked(_Pause, control.pause_generation, lambda _: paused),
        "/resume": asked(KnownFields, control.resume_generation, lambda _: resumed),
        "/sleep": asked(_Sleep, control.sleep, sleeping),
        "/wake_up": asked(_WakeUp, control.wake_up, sleeping),
        "/reset_prefix_cache": asked(
            _ResetPrefixCache, control.reset_prefix_cache, lambda done: {"success": done}
        ),
        "/update_weights": guarded(update_weights),
    }
    gets = {
        "/is_paused": asked(KnownFields, control.is_paused, lambda on: {"is_paused": on}),
        "/is_sleeping": asked(KnownFields, control.is_sleeping, sleeping),
    }
    return [
        *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
        *(Route(path, handler) for path, handler in gets.items()),
    ]


def _require_no_page(request: Request) -> None:
    """Refuse what a web page sends: to this machine any page may, without a body's JSON."""
    if "origin" in request.headers:
        raise HTTPException(403, "these endpoints are not for web pages")
