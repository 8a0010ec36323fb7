"""Answers to ``/v1/chat/completions``, whole or in pieces, with tool calls and reasoning."""

from __future__ import annotations

from typing import Any

from absorbed_mla.serving.outputs import PositionLogprobs, RequestOutput
from absorbed_mla.serving.server.chat_request import ChatRequest
from absorbed_mla.serving.server.logprobs import chat_logprobs
from absorbed_mla.serving.server.message_parts import CallPiece, MessageParser, Piece
from absorbed_mla.serving.server.protocol import Answer
from absorbed_mla.serving.server.request_stream import Snapshot

Json = dict[str, Any]


class ChatAnswer(Answer):
    """Builds the JSON of an answer to a chat; see :class:`Answer`."""

    body: ChatRequest
    _prefix, _object, _object_of_pieces = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # By output.
        self._parsers: dict[int, MessageParser] = {}

    def parser(self, index: int, request: RequestOutput) -> MessageParser:
        """What finds the parts of an output's message."""
        if index not in self._parsers:
            assert self._tokenizer is not None
            found = self.body.message_parser(request.prompt_token_ids, self._tokenizer)
            self._parsers[index] = found
        return self._parsers[index]

    def _said(
        self,
        i: int,
        index: int,
        request: RequestOutput,
        before: Snapshot | None,
        now: Snapshot,
        logprobs: list[PositionLogprobs] | None,
        whole: bool,
    ) -> Json | None:
        parser, shown = self.parser(index, request), None
        said: Json = {} if before else {"role": "assistant"}
        piece = parser.read(now.text, now.finish_reason is not None)
        if parser.is_plain:
            said["content"] = piece.content
        else:
            is_news = piece or now.finish_reason or logprobs or self.body.return_token_ids
            if before and not is_news:
                return None
            said |= _message(piece) if whole else _delta(piece, before is None)
        if logprobs is not None:
            by_id = self.body.return_tokens_as_token_ids
            shown = chat_logprobs(logprobs, by_id=by_id)
        return {"message" if whole else "delta": said, "logprobs": shown}

    def _finish(self, index: int, now: Snapshot) -> str | None:
        parser = self._parsers.get(index)
        # As OpenAI has it, a call that was asked for by its name is no reason.
        calls = parser is not None and parser.message.calls and not self.body.is_named
        return "tool_calls" if calls and now.finish_reason == "stop" else now.finish_reason

    def _of_first_piece(self, request: RequestOutput) -> Json:
        return {}

    def of_prompt(self, request: RequestOutput) -> Json:
        """See the base."""
        ids = self.body.return_token_ids
        return {"prompt_token_ids": request.prompt_token_ids} if ids else {}


def _message(found: Piece) -> Json:
    """A message with all its parts."""
    parts = {"content": found.content or (None if found else "")}
    parts |= _reasoning(found)
    calls = [_call(piece) for _, piece in sorted(found.calls.items())]
    return {**parts, "tool_calls": calls} if calls else parts


def _delta(found: Piece, is_first: bool) -> Json:
    """The parts of a message that have grown."""
    parts = {"content": found.content} if found.content or (is_first and not found) else {}
    parts |= _reasoning(found)
    calls = [{"index": i, **_call(piece)} for i, piece in sorted(found.calls.items())]
    return {**parts, "tool_calls": calls} if calls else parts


def _reasoning(found: Piece) -> Json:
    """Under vLLM's name, and the one that it had before and DeepSeek's interface has."""
    names = ("reasoning_content", "reasoning") if found.reasoning else ()
    return dict.fromkeys(names, found.reasoning)


def _call(piece: CallPiece) -> Json:
    if piece.id is None:
        return {"function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"id": piece.id, "type": "function", "function": function}
