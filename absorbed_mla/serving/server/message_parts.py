"""Parts of an assistant's message, as pieces in which a text that grows brings them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class CallPiece:
    """What a tool call has more than before.

    Attributes:
        id, name: Of the call and its function, with its first piece; None later.
        arguments: A piece of JSON; all of them join to the arguments.
    """

    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class Piece:
    """What a message has more than before.

    Attributes:
        content, reasoning: Text.
        calls: By the number of the call in the message.
    """

    content: str = ""
    reasoning: str = ""
    calls: dict[int, CallPiece] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def add(self, other: Piece) -> None:
        """Join what comes behind it."""
        self.content += other.content
        self.reasoning += other.reasoning
        for index, piece in other.calls.items():
            one = self.calls.setdefault(index, CallPiece())
            if piece.id is not None:
                one.id, one.name = piece.id, piece.name
            one.arguments += piece.arguments


class Parser(Protocol):
    """Finds the parts of a text that grows."""

    def read(self, text: str) -> Piece:
        """What is known to be of the message with ``text`` behind what came before."""
        ...

    def finish(self) -> Piece:
        """What was held back, at the end of the text."""
        ...


class MessageParser:
    """Finds the parts of one output, whatever pieces it comes in.

    Args:
        reasoning: Takes what the model thinks away from its text; None: it is all content.
        calls: Finds tool calls in the content; None: there are none.
        most_calls: More calls are left out.
        with_reasoning: Whether reasoning is shown.

    Attributes:
        is_plain: Whether the text is all content.
        message: All that has been found.
    """

    def __init__(
        self,
        reasoning: Parser | None,
        calls: Parser | None,
        *,
        most_calls: int | None = None,
        with_reasoning: bool = True,
    ) -> None:
        self._reasoning, self._calls = reasoning, calls
        self.is_plain = reasoning is None and calls is None
        self._most_calls, self._with_reasoning = most_calls, with_reasoning
        self._read = 0
        self._ended = False
        self.message = Piece()

    def read(self, text: str, ended: bool) -> Piece:
        """What the message has more than after the call before.

        Args:
            text: The whole, so far.
            ended: Whether it is the last.
        """
        piece = self._content(text[self._read :])
        self._read = len(text)
        if ended and not self._ended:
            self._ended = True
            if self._reasoning is not None:
                piece.add(self._of_calls(self._reasoning.finish()))
            if self._calls is not None:
                piece.add(self._calls.finish())
        if self._most_calls is not None:
            piece.calls = {i: one for i, one in piece.calls.items() if i < self._most_calls}
        if not self._with_reasoning:
            piece.reasoning = ""
        self.message.add(piece)
        return piece

    def _content(self, text: str) -> Piece:
        found = Piece(text) if self._reasoning is None else self._reasoning.read(text)
        return self._of_calls(found)

    def _of_calls(self, found: Piece) -> Piece:
        if self._calls is None or not found.content:
            return found
        piece = self._calls.read(found.content)
        return dataclasses.replace(piece, reasoning=found.reasoning)


def first_mark(text: str, marks: Iterable[str]) -> tuple[int, str | None]:
    """Where the first of some marks begins in a text, and which one.

    Returns:
        Without a whole one, where the text's end may begin one, or the length, and None.
    """
    places = [(text.find(mark), -len(mark), mark) for mark in marks]
    found = min((one for one in places if one[0] >= 0), default=None)
    if found is not None:
        return found[0], found[2]
    longest = max((len(mark) for _, _, mark in places), default=0)
    for begin in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[begin:]) for _, _, mark in places):
            return begin, None
    return len(text), None
