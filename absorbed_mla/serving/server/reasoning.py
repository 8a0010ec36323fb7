"""What a model thinks before it answers, taken apart from its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from absorbed_mla.serving.server.message_parts import Piece, first_mark
from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer, Tokenizer

BEGIN, END = "<think>", "</think>"
_Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class ReasoningFormat:
    """How models of one family think, by vLLM's name of its ``--reasoning-parser``.

    Thinking stands between ``<think>`` and ``</think>``, of which the chat template may have
    written the first one, or both, behind the conversation.

    Attributes:
        thinks: Whether an answer is thought that begins without a mark, where the template has
            written none; by ``chat_template_kwargs``.
        also_ends: What ends thinking, too, and is part of the answer.
        may_think: As ``thinks``, where the answer may also begin with a mark of the model's own;
            None: that is the same.
    """

    thinks: Callable[[_Kwargs], bool]
    also_ends: tuple[str, ...] = ()
    may_think: Callable[[_Kwargs], bool] | None = None

    def parser(
        self, prompt_end: str, kwargs: _Kwargs, *, structured: bool = False
    ) -> ReasoningParser:
        """For one output.

        Args:
            prompt_end: The last characters of its prompt.
            kwargs: The request's ``chat_template_kwargs``.
            structured: Whether the answer is structured output, which begins behind the reasoning:
                nothing else may come between them.
        """
        prompt_end = prompt_end.rstrip()
        if prompt_end.endswith(END):
            return ReasoningParser(self, "content")
        if prompt_end.endswith(BEGIN):
            return ReasoningParser(self, "reasoning", structured=structured)
        if structured and not (self.may_think or self.thinks)(kwargs):
            return ReasoningParser(self, "content")
        thinks = structured or self.thinks(kwargs)
        return ReasoningParser(self, "begin", thinks=thinks, structured=structured)


class ReasoningParser:
    """Takes one output's reasoning away from its content.

    Args:
        format: Of the model.
        state: ``"begin"``, where the first characters decide, ``"reasoning"`` or ``"content"``.
        thinks: Whether it is reasoning if they are no ``<think>``.
        structured: As for :meth:`ReasoningFormat.parser`.
    """

    def __init__(
        self, format: ReasoningFormat, state: str, *, thinks: bool = True, structured: bool = False
    ) -> None:
        self._ends = (END, *format.also_ends)
        self._left_out = self._ends if structured else (END,)
        self._state, self._thinks, self._rest = state, thinks, ""

    def ends(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Token ids of each mark that ends the reasoning; none, if nothing is thought.

        Raises:
            ValueError: If a mark is no token, so that others may have parts of it.
        """
        marks = () if self._state == "content" else self._ends
        found = [tokenizer.encode(mark, begin=False) for mark in marks]
        for mark, tokens in zip(marks, found):
            if len(tokens) != 1 and not isinstance(tokenizer, ByteTokenizer):
                raise ValueError(
                    f"structured_outputs behind reasoning need a tokenizer that has {mark} as one "
                    f"token, got {len(tokens)}"
                )
        return found

    def read(self, text: str) -> Piece:
        """See :class:`absorbed_mla.serving.server.message_parts.Parser`."""
        text, self._rest = self._rest + text, ""
        if self._state == "begin":
            first = text.lstrip()
            if BEGIN.startswith(first):
                self._rest = text
                return Piece()
            marked = first.startswith(BEGIN)
            text = first[len(BEGIN) :] if marked else text
            self._state = "reasoning" if marked or self._thinks else "content"
        return Piece(text) if self._state == "content" else self._reasoning(text)

    def _reasoning(self, text: str) -> Piece:
        place, mark = first_mark(text, self._ends)
        if mark is None:
            self._rest = text[place:]
            return Piece(reasoning=text[:place])
        self._state = "content"
        end = place + len(mark) if mark in self._left_out else place
        return Piece(text[end:], text[:place])

    def finish(self) -> Piece:
        """See :class:`absorbed_mla.serving.server.message_parts.Parser`."""
        if self._state == "reasoning" or (self._state == "begin" and self._thinks):
            return Piece(reasoning=self._rest)
        return Piece(self._rest)


REASONING_PARSERS = {
    "deepseek_r1": ReasoningFormat(lambda kwargs: True),
    "deepseek_v3": ReasoningFormat(
        lambda kwargs: bool(kwargs.get("thinking") or kwargs.get("enable_thinking"))
    ),
    "glm45": ReasoningFormat(
        lambda kwargs: False, may_think=lambda kwargs: bool(kwargs.get("enable_thinking", True))
    ),
    "kimi_k2": ReasoningFormat(
        lambda kwargs: bool(kwargs.get("thinking", True)),
        also_ends=("<|tool_calls_section_begin|>",),
    ),
}
