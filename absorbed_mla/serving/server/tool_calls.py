"""Tool calls in a model's text, found while it grows, for formats that are tables of marks."""

from __future__ import annotations

import ast
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from absorbed_mla.serving.server.message_parts import CallPiece, Piece, first_mark

Json = dict[str, Any]


def new_call_id() -> str:
    """The id of a call that the model gave none."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _with_new_id(header: str) -> tuple[str, str]:
    return new_call_id(), header


@dataclass(frozen=True)
class ToolFormat:
    """A format in which a model writes tool calls: an entry of ``registry.TOOL_PARSERS``.

    Attributes:
        name, summary: See :class:`absorbed_mla.registry.Described`.
        states: State -> marks that end it -> the state that each of them begins. What a state
            holds, by its name: ``content`` text of the message; ``name`` the header of a call;
            ``arguments`` their JSON; ``key`` the name of an argument, and ``text``, ``json`` or
            ``value`` the argument itself: characters as they are, JSON, or whichever of them the
            tool's schema says. Other states hold nothing. The text begins as content; ``content``
            and ``calls`` are outside of any call.
        marks: Parts of every chat template with this format.
        not_marks: Parts of none.
        id_and_name: Of a call by its header.
    """

    name: str
    summary: str
    states: Mapping[str, Mapping[str, str]]
    marks: tuple[str, ...]
    not_marks: tuple[str, ...] = ()
    id_and_name: Callable[[str], tuple[str, str]] = _with_new_id

    def why_not(self, template: str) -> str | None:
        """Why it is not the format of a chat template; None if it is."""
        for mark in self.marks:
            if mark not in template:
                return f"the chat template has no {mark}"
        for mark in self.not_marks:
            if mark in template:
                return f"the chat template has {mark}"
        return None

    def parser(self, tools: Sequence[Json]) -> ToolCallParser:
        """For one output of a request with these tools, as OpenAI's interface has them."""
        return ToolCallParser(self, tools)


class ToolCallParser:
    """Finds the tool calls of one output.

    Text that looks like the beginning of a call and has no name in the end stays text; spaces
    between text and a call are left out.

    Args:
        format: Of the calls.
        tools: Whose schemas say what an argument is.
    """

    def __init__(self, format: ToolFormat, tools: Sequence[Json]) -> None:
        self._format, self._tools = format, tools
        self._state = "content"
        # What may be part of a mark; spaces that may be left out; what a state holds to its end.
        self._rest, self._spaces, self._held = "", "", ""
        # All since the content, while no call has begun there.
        self._raw = ""
        # Calls that have begun; of the last one, its arguments' schemas, and the one that is read.
        self._count, self._key = 0, ""
        self._properties: Any = None
        # Arguments that the call has, if they do not come as one JSON text; whether it has any.
        self._num_arguments: int | None = None
        self._is_empty, self._is_text = True, False

    def read(self, text: str) -> Piece:
        """See :class:`absorbed_mla.serving.server.message_parts.Parser`."""
        found = Piece()
        self._rest += text
        while True:
            marks = self._format.states[self._state]
            place, mark = first_mark(self._rest, marks)
            self._take(self._rest[:place], found)
            self._rest = self._rest[place + len(mark or "") :]
            if mark is None:
                return found
            self._leave(mark, marks[mark], found)

    def finish(self) -> Piece:
        """See :class:`absorbed_mla.serving.server.message_parts.Parser`."""
        if self._state == "content":
            return Piece(("" if self._count else self._spaces) + self._rest)
        return Piece(self._spaces + self._raw + self._rest if self._raw else "")

    def _take(self, text: str, found: Piece) -> None:
        """Text within a state."""
        if self._raw:
            self._raw += text
        if self._state in ("content", "arguments"):
            text = self._spaces + text
            shown = text.rstrip()
            self._spaces = text[len(shown) :]
            if self._state == "content":
                found.content += shown
            else:
                self._add(shown, found)
        elif self._is_text and self._state in ("text", "value"):
            self._add(_dumped(text)[1:-1], found)
        else:
            self._held += text

    def _leave(self, mark: str, state: str, found: Piece) -> None:
        """A mark ends a state and begins another one."""
        before, held = self._state, self._held
        self._state, self._held = state, ""
        if self._raw or before == "content":
            self._raw += mark
        match before:
            case "name":
                self._begin_call(held.strip(), found)
            case "arguments":
                self._add("{}" * self._is_empty, found)
                self._spaces = ""
            case "key":
                self._key = held.strip()
            case "text" | "json" | "value":
                value = converted(held, {} if before == "json" else self._schema())
                self._add('"' if self._is_text else _dumped(value), found)
        if self._state in ("text", "json", "value"):
            self._begin_argument(found)
        elif self._state in ("content", "calls"):
            self._end_call(found)

    def _begin_call(self, header: str, found: Piece) -> None:
        if not header:
            self._state = "content"
            return
        call, name = self._format.id_and_name(header)
        found.calls[self._count] = CallPiece(call, name)
        named = (one["function"] for one in self._tools if one["function"]["name"] == name)
        self._properties = (next(named, {}).get("parameters") or {}).get("properties")
        self._count += 1
        self._raw, self._spaces, self._is_empty = "", "", True
        self._num_arguments = None if self._state == "arguments" else 0

    def _begin_argument(self, found: Piece) -> None:
        text = ("," if self._num_arguments else "{") + f"{_dumped(self._key)}:"
        self._num_arguments = (self._num_arguments or 0) + 1
        of_strings = self._state == "value" and _types(self._schema()) == {"string"}
        self._is_text = self._state == "text" or of_strings
        self._add(text + '"' * self._is_text, found)

    def _end_call(self, found: Piece) -> None:
        if self._num_arguments is not None:
            self._add("}" if self._num_arguments else "{}", found)
            self._num_arguments = None
        if self._state == "content":
            # Nothing of it was a call.
            if self._raw:
                found.content += self._spaces + self._raw
                self._spaces = ""
            self._raw = ""

    def _add(self, text: str, found: Piece) -> None:
        """Add to the arguments of the last call."""
        if text:
            self._is_empty = False
            found.calls.setdefault(self._count - 1, CallPiece()).arguments += text

    def _schema(self) -> Json:
        properties = self._properties
        found = properties.get(self._key) if isinstance(properties, dict) else None
        return found if isinstance(found, dict) else {}


def converted(text: str, schema: Json) -> Any:
    """The argument that a model has written as characters.

    Args:
        schema: Of the argument; ``{}`` if nothing is known.

    Returns:
        A string where the schema has one and the text is no JSON of its other types.
    """
    types, found = _types(schema), text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
        # Python's for what is no literal, also for one that is nested too deep.
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        found = value
        break
    if "string" not in types or _TYPE_NAMES.get(type(found)) in types - {"string"}:
        return found
    return text


# Of JSON's values, as schemas call them.
_TYPE_NAMES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def _types(schema: Json) -> set[str]:
    """Types of values that a schema names."""
    named = schema.get("type")
    types = {one for one in (named, *_listed(named)) if isinstance(one, str)}
    for one in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
        types |= _types(one) if isinstance(one, dict) else set()
    if not types:
        types = {_TYPE_NAMES.get(type(value), "string") for value in _listed(schema.get("enum"))}
    return types | ({"integer"} if "number" in types else set())


def _listed(given: Any) -> list:
    """Nothing of what a client's schema has in place of a list."""
    return given if isinstance(given, list) else []


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
