"""What a connection may send, and how slowly, before anybody looks at its key or its request.

A request is refused when its head is longer than ``HEAD_BYTES``, when it comes slower than
``_SECONDS`` and ``_BYTES_PER_SECOND`` allow, and when it is too large. uvicorn has limits of its
own only for heads that h11 parses; those of a body's content are in ``request_fields.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from absorbed_mla.serving.server.metrics import Metrics
from absorbed_mla.serving.server.protocol import error_body

try:
    import httptools
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:
    HttpToolsProtocol = None

_logger = logging.getLogger(__name__)

# A prompt of the longest models takes about a megabyte.
MAX_BODY_BYTES = 16 << 20
# Of a request line and headers together; also of what a body has beside its content.
HEAD_BYTES = 64 << 10
# Of a chunk of a body, its length and line ends.
_CHUNK_FRAME = 16
# Seconds that a request may take to arrive, and bytes for which it gets a second more.
_SECONDS = 20.0
_BYTES_PER_SECOND = 16 << 10
# Connections whose requests have not arrived; of more, the one that began first is closed.
_MOST_ARRIVING = 512
_REASONS = {408: "the request came too slowly", 431: f"headers may have {HEAD_BYTES} bytes"}


class _Arriving(asyncio.Protocol):
    """Part of a protocol of uvicorn's: a request must arrive in time, and end.

    Attributes:
        arriving: Connections of the server whose requests have not arrived, in their order.
        most_bytes: Of a request, of which uvicorn reads the rest after an early answer.
        metrics: Count refusals, which the application does not see, or answers in vain.
    """

    arriving: dict[_Arriving, None]
    most_bytes: int
    metrics: Metrics
    # Whether the request has not arrived as a whole, or none has begun.
    is_arriving: bool
    # Of uvicorn's protocols.
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: Any
    cycle: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._begin()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._timer is None:
            self._begin()
        self._received += len(data)
        super().data_received(data)
        if self.transport.is_closing() or not self.is_arriving:
            self._forget()
        elif self._received > self.most_bytes:
            self.refuse(413)
        else:
            self._watch()

    def refuse(self, status: int) -> None:
        """Close the connection, with an answer if a request has begun and has none."""
        self._forget()
        if self._received and not self._answered:
            reason = _REASONS.get(status, HTTPStatus(status).phrase)
            _logger.warning("a request was refused with %d: %s", status, reason)
            self._count(status)
            body = json.dumps(error_body(reason, "invalid_request_error", status)).encode()
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                "connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """See uvicorn: it is no HTTP."""
        if not self._answered:
            self._count(400)
        super().send_400_response(msg)  # type: ignore[misc]

    @property
    def _answered(self) -> bool:
        return self.cycle is not self._before and self.cycle.response_started

    def _count(self, status: int) -> None:
        scope: dict[str, Any] = {}
        if self.cycle is not self._before:
            # The application has the request already, and waits for the rest of it.
            scope = self.cycle.scope
            scope["state"]["refused"] = status
        self.metrics.answered(scope.get("path", ""), scope.get("method", ""), status)

    def _begin(self) -> None:
        self._since, self._received = self.loop.time(), 0
        # uvicorn's record of the request before this one.
        self._before = self.cycle

    def _watch(self) -> None:
        """Look whether the request has arrived when its time is over."""
        if self._timer is None:
            self._timer = self.loop.call_later(_SECONDS, self._check)
            self.arriving[self] = None
            if len(self.arriving) > _MOST_ARRIVING:
                next(iter(self.arriving)).refuse(503)

    def _forget(self) -> None:
        self.arriving.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        end = self._since + _SECONDS + self._received / _BYTES_PER_SECOND
        # What waits for the answer before it is not read.
        left = _SECONDS if self.flow.read_paused else end - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._check)
        else:
            self.refuse(408)


class _H11(_Arriving, H11Protocol):
    """h11 has a limit of the length of heads."""

    @property
    def is_arriving(self) -> bool:  # type: ignore[override]
        """See the base."""
        return self.conn.their_state.__name__ in ("IDLE", "SEND_BODY")


if HttpToolsProtocol is not None:

    class _Parser(httptools.HttpRequestParser):
        """httptools' parser, but for requests to upgrade the connection, behind which that ends.

        A server may ignore them (RFC 9110, 7.8). Java's client begins with one, for HTTP/2.
        """

        def __init__(self, protocol: _HttpTools) -> None:
            super().__init__(protocol)
            self._protocol = protocol
            # As in uvicorn; older releases of httptools have no such method.
            with contextlib.suppress(AttributeError):
                self.set_dangerous_leniencies(lenient_data_after_close=True)

        def feed_data(self, data: bytes) -> None:
            """See httptools."""
            try:
                super().feed_data(data)
            except httptools.HttpParserUpgrade as error:
                if not self._protocol.asks_for_upgrade:
                    raise
                self._protocol.read_without_upgrade(data[error.args[0] :])

    class _HttpTools(_Arriving, HttpToolsProtocol):
        """httptools keeps a head of any length, and headers after a body."""

        is_arriving = True
        # Whether the head that was read last does, and is read again without.
        asks_for_upgrade = False
        # Bytes of the request that are not of its body's content.
        _besides = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """See asyncio."""
            self.parser = _Parser(self)
            super().connection_made(transport)

        def read_without_upgrade(self, rest: bytes) -> None:
            """Read a head again, as one that asks for no upgrade, and what comes behind it."""
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
            lines += [b"%s: %s" % pair for pair in self.headers if pair[0] != b"upgrade"]
            self.parser = _Parser(self)
            self.parser.feed_data(b"\r\n".join([*lines, b"", rest]))

        def on_headers_complete(self) -> None:
            """See httptools."""
            # uvicorn refuses a CONNECT.
            asks = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
            self.asks_for_upgrade = asks
            if not asks:
                super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            """See asyncio."""
            self._besides += len(data)
            super().data_received(data)
            if self._besides > HEAD_BYTES and not self.transport.is_closing():
                self.refuse(431)

        def on_message_begin(self) -> None:
            """See httptools."""
            self.is_arriving = True
            super().on_message_begin()

        def on_body(self, body: bytes) -> None:
            """See httptools."""
            self._besides = max(0, self._besides - len(body) - _CHUNK_FRAME)
            super().on_body(body)

        def on_message_complete(self) -> None:
            """See httptools."""
            if not self.asks_for_upgrade:
                self.is_arriving, self._besides = False, 0
                super().on_message_complete()


def limited_protocol(max_body_bytes: int, metrics: Metrics) -> type[asyncio.Protocol]:
    """A protocol of uvicorn's with these limits, for one server with its metrics."""
    base = _H11 if HttpToolsProtocol is None else _HttpTools
    # A body in chunks may take twice its content.
    most = 2 * max_body_bytes + HEAD_BYTES
    known = {"arriving": {}, "most_bytes": most, "metrics": metrics}
    return type("LimitedProtocol", (base,), known)
