"""Bodies and queries of requests: read within limits, as objects whose wrong fields are named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from absorbed_mla.serving.server.protocol import KnownFields

# Of a body's JSON: strings, lists and objects together, and commas, which come between numbers.
# Python would be busy for seconds with a body full of them, and do nothing else meanwhile.
_MOST_PARTS, _MOST_COMMAS = 2**15, 2**20
# Smaller bodies have few.
_SMALL = 128 << 10
# Bytes of a body that cost nothing worth counting; of what is more, all clients together get so
# many a second, after a burst of as many seconds: reading and parsing them holds up all others.
_FREE_BYTES, _BYTES_OF_ALL, _BURST_SECONDS = 64 << 10, 4 << 20, 2.0
# That a number counts for besides its own.
_BYTES_OF_A_NUMBER = 3
# Bodies that are in memory together, of the largest size.
_MOST_BODIES = 16
# Fields that a refusal names.
_MOST_PROBLEMS = 10
_Fields = TypeVar("_Fields", bound=KnownFields)


class Bodies:
    """Reads bodies of requests.

    Args:
        most: Bytes of one.
    """

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        # Until when the time of the loop's clock is spent.
        self._spent = 0.0

    async def read(self, request: Request) -> bytes:
        """The body of a request, whose length ``state.body_bytes`` has then.

        Raises:
            HTTPException: If it is no JSON by its type, compressed, too large, in too many parts,
                or too many others are read.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A web page of any origin may send others, and what has no type.
        if kind != "application/json" and not kind.endswith("+json"):
            raise HTTPException(415, f"Content-Type must be application/json, got {kind!r}")
        too_large = HTTPException(413, f"the body must have at most {self._most} bytes")
        coding = request.headers.get("content-encoding", "identity")
        if coding.strip().lower() != "identity":
            raise HTTPException(415, f"Content-Encoding must be identity, got {coding!r:.100}")
        # A number: the HTTP parser refuses others.
        if int(request.headers.get("content-length", 0)) > self._most:
            raise too_large
        content = bytearray()
        try:
            async for chunk in request.stream():
                content += chunk
                self._held += len(chunk)
                if len(content) > self._most:
                    raise too_large
                if self._held > _MOST_BODIES * self._most:
                    raise HTTPException(503, "too many large requests arrive; try again later")
                await self._pace(min(len(chunk), len(content) - _FREE_BYTES))
            request.state.body_bytes = len(content)
            if len(content) > _SMALL:
                await self._pace(_BYTES_OF_A_NUMBER * _require_few_parts(content))
            return bytes(content)
        finally:
            self._held -= len(content)

    async def _pace(self, count: int) -> None:
        """Wait until bytes may be read."""
        if count > 0:
            now = asyncio.get_running_loop().time()
            self._spent = max(self._spent, now - _BURST_SECONDS) + count / _BYTES_OF_ALL
            if self._spent > now:
                await asyncio.sleep(self._spent - now)


async def read_body(request: Request, kind: type[_Fields]) -> _Fields:
    """The body of a request.

    Raises:
        HTTPException: See :class:`Bodies`.
        ValueError: If it is no JSON of this kind, naming each field that is wrong.
    """
    return _made(kind.model_validate_json, await request.app.state.bodies.read(request))


def read_query(request: Request, kind: type[_Fields]) -> _Fields:
    """What stands behind a path's ``?``; a field of several values is repeated.

    Raises:
        ValueError: If it is not of this kind, naming each field that is wrong.
    """
    found: dict[str, Any] = dict(request.query_params)
    for name, field in kind.model_fields.items():
        if name in found and "list" in str(field.annotation):
            found[name] = request.query_params.getlist(name)
    return _made(partial(kind.model_validate_strings, strict=False), found)


def _made(make: Callable[[Any], _Fields], given: Any) -> _Fields:
    try:
        return make(given)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        problems = [
            f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}"
            for one in found[:_MOST_PROBLEMS]
        ]
        raise ValueError("; ".join(problems).replace(": Value error, ", ": ")) from error


def _require_few_parts(content: bytearray) -> int:
    """Check that a JSON document is no burden to parse, which is so where it has few parts.

    Returns:
        Commas, which come between numbers.

    Raises:
        HTTPException: If it has too many.
    """
    # Without what is escaped, quotes are where strings begin and end.
    bare = content.replace(rb"\\", b"").replace(rb"\"", b"")
    parts = bare.count(b'"') // 2
    if parts <= _MOST_PARTS:
        outside = b"".join(bare.split(b'"')[::2])
        parts += outside.count(b"[") + outside.count(b"{")
        commas = outside.count(b",")
        if parts <= _MOST_PARTS and commas <= _MOST_COMMAS:
            return commas
    raise HTTPException(
        413,
        f"the body must have at most {_MOST_PARTS} strings, lists and objects together, and "
        f"{_MOST_COMMAS} numbers",
    )
