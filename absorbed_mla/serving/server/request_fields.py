"""Bodies and queries of requests as objects, with every field that is wrong named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from absorbed_mla.serving.server.protocol import KnownFields

# Fields that a refusal names.
_MOST_PROBLEMS = 10
_Fields = TypeVar("_Fields", bound=KnownFields)


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
