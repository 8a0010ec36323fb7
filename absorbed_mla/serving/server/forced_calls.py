"""Tool calls that a request asks for: schemas that structured output follows, and their readers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from absorbed_mla.serving.server.message_parts import CallPiece, Piece
from absorbed_mla.serving.server.tool_calls import new_call_id

Json = dict[str, Any]
# Of a call in the list, up to its arguments.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"parameters"\s*:\s*')
_STRUCTURE = re.compile(r'["{}\[\]]')
# The rest of a string, with its end or without.
_STRING = re.compile(r'(?:[^"\\]|\\.)*("?)', re.DOTALL)


def schema_of_one(tool: Mapping[str, Any]) -> Json:
    """Of the arguments of one tool, which are all that the model writes."""
    return {"type": "object", **(tool["function"].get("parameters") or {"properties": {}})}


def schema_of_several(tools: Sequence[Mapping[str, Any]], most: int | None) -> Json:
    """Of a list of calls, each ``{"name": ..., "parameters": ...}``.

    Args:
        most: Calls.
    """
    choices, definitions = [], dict[str, Any]()
    for tool in tools:
        parameters = dict(schema_of_one(tool))
        # References begin at the root.
        for key in ("$defs", "definitions"):
            if key in parameters:
                own, others = parameters.pop(key), definitions.setdefault(key, {})
                if not isinstance(own, dict):
                    raise ValueError(f"{key} of tools must be an object, got {own!r:.100}")
                twice = sorted(name for name in own if others.get(name, own[name]) != own[name])
                if twice:
                    raise ValueError(f"tools must not have several {key} of {', '.join(twice)}")
                others |= own
        properties = {"name": {"enum": [tool["function"]["name"]]}, "parameters": parameters}
        one: Json = {"type": "object", "properties": properties, "required": [*properties]}
        choices.append({**one, "additionalProperties": False})
    bounds = {"minItems": 1} if most is None else {"minItems": 1, "maxItems": most}
    return {"type": "array", "items": {"anyOf": choices}, **bounds, **definitions}


class NamedCall:
    """A text that is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def read(self, text: str) -> Piece:
        """See :class:`absorbed_mla.serving.server.message_parts.Parser`."""
        call = CallPiece(arguments=text)
        if self._name is not None:
            call.id, call.name, self._name = new_call_id(), self._name, None
        return Piece(calls={0: call})

    def finish(self) -> Piece:
        """See :class:`absorbed_mla.serving.server.message_parts.Parser`."""
        return Piece()


class ListedCalls:
    """A text that is a list of calls, as :func:`schema_of_several` has them."""

    def __init__(self) -> None:
        self._rest, self._count = "", 0
        # Of what is open within arguments; None: between calls.
        self._depth: int | None = None
        self._in_string = False

    def read(self, text: str) -> Piece:
        """See :class:`absorbed_mla.serving.server.message_parts.Parser`."""
        found = Piece()
        self._rest += text
        while True:
            if self._depth is None:
                head = _HEAD.search(self._rest)
                if head is None:
                    # White space has no end, and would be read again with each token.
                    self._rest = "".join(self._rest.split())
                    return found
                found.calls[self._count] = CallPiece(new_call_id(), head[1])
                self._rest = self._rest[head.end() :]
                self._depth, self._count = 0, self._count + 1
            end = self._end_of_arguments()
            if end:
                call = found.calls.setdefault(self._count - 1, CallPiece())
                call.arguments += self._rest[:end]
            self._rest = self._rest[end:]
            if self._depth is not None:
                return found

    def _end_of_arguments(self) -> int:
        """How much of the rest is arguments; their end sets the depth to None."""
        assert self._depth is not None
        place = 0
        while True:
            if self._in_string:
                string = _STRING.match(self._rest, place)
                assert string is not None
                if not string[1]:
                    # But for a backslash whose character has not come.
                    return string.end()
                place, self._in_string = string.end(), False
            one = _STRUCTURE.search(self._rest, place)
            if one is None:
                return len(self._rest)
            place = one.end()
            if one[0] == '"':
                self._in_string = True
                continue
            self._depth += 1 if one[0] in "{[" else -1
            if self._depth == 0:
                self._depth = None
                return place

    def finish(self) -> Piece:
        """See :class:`absorbed_mla.serving.server.message_parts.Parser`."""
        if self._depth is None or not self._rest:
            return Piece()
        return Piece(calls={self._count - 1: CallPiece(arguments=self._rest)})
