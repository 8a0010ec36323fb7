"""The HTTP server around the application."""

from __future__ import annotations

import asyncio
import resource
import socket
import time

import uvicorn
from starlette.applications import Starlette

from absorbed_mla.serving.server.limits import HEAD_BYTES, MAX_BODY_BYTES, limited_protocol
from absorbed_mla.serving.server.logs import log_config
from absorbed_mla.serving.server.service import Service

# Seconds to send the errors, after which connections are cut.
_LAST_WORDS = 5
# Seconds between two looks whether answers run.
_POLL = 0.02


class HTTPServer(uvicorn.Server):
    """uvicorn's server, which tells its clients when it ends before their answers.

    Args:
        app: The application.
        service: Of the application.
        host: Address.
        port: 0 for any that is free; uvicorn logs which.
        access_log: Whether it logs each request.
        max_body_bytes: Of a request.
        shutdown_timeout: Seconds that running answers have after a signal; then their clients get
            an error.
        log_format: See :func:`log_config`.
    """

    def __init__(
        self,
        app: Starlette,
        service: Service,
        host: str,
        port: int,
        *,
        access_log: bool = True,
        max_body_bytes: int = MAX_BODY_BYTES,
        shutdown_timeout: float = 5,
        log_format: str = "text",
    ) -> None:
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http=limited_protocol(max_body_bytes, app.state.metrics),
            ws="none",
            h11_max_incomplete_event_size=HEAD_BYTES,
            access_log=access_log,
            timeout_graceful_shutdown=_LAST_WORDS,
            log_config=log_config(log_format, requests=access_log),
        )
        super().__init__(config)
        self._service, self._grace = service, shutdown_timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; until running answers have ended, new ones are refused with 503."""
        self._service.drain()
        end = time.monotonic() + self._grace
        while self.server_state.tasks and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(_POLL)
        self._service.end()
        await super().shutdown(sockets)


def require_free(host: str, port: int) -> None:
    """Check that a server can listen there, before minutes are spent on the model.

    Raises:
        ValueError: Naming the options, if it cannot.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host {host} --port {port}: {error}") from error


def allow_many_connections() -> None:
    """Let this process have as many open files as the machine allows; often it is 1,024 first."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
