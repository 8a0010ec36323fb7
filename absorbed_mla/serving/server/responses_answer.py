"""Answers to ``/v1/responses``, whole or as events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absorbed_mla.serving.outputs import RequestOutput
from absorbed_mla.serving.server.chat_answer import ChatAnswer
from absorbed_mla.serving.server.message_parts import Piece
from absorbed_mla.serving.server.protocol import error_body
from absorbed_mla.serving.server.request_stream import Snapshot, Update
from absorbed_mla.serving.server.responses_request import ResponsesRequest
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer

Json = dict[str, Any]
# An event: its type without "response.", and what it has besides.
Event = tuple[str, Json]


class OutputItems:
    """The items of a response, as their pieces come.

    Args:
        name: Of the request, which is part of their ids.

    Attributes:
        items: So far; all but the last one are complete.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.items: list[Json] = []
        # What the last item is: "reasoning", "content", or the number of a call.
        self._open: str | int | None = None

    def add(self, piece: Piece) -> Iterator[Event]:
        """Events of what comes behind."""
        if piece.reasoning:
            yield from self._add_text("reasoning", piece.reasoning)
        if piece.content:
            yield from self._add_text("content", piece.content)
        for number, call in sorted(piece.calls.items()):
            if self._open != number:
                known = {"call_id": call.id, "name": call.name, "arguments": ""}
                yield from self._begin(number, "function_call", "fc", known)
            if call.arguments:
                self.items[-1]["arguments"] += call.arguments
                yield self._of_item("function_call_arguments.delta", delta=call.arguments)

    def end(self, status: str) -> Iterator[Event]:
        """Events of the end of all; there is a message at least.

        Args:
            status: Of the last item.
        """
        if not self.items:
            yield from self._begin("content", "message", "msg", {"role": "assistant"})
        yield from self._end(status)

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            if kind == "reasoning":
                yield from self._begin(kind, "reasoning", "rs", {"summary": []})
            else:
                yield from self._begin(kind, "message", "msg", {"role": "assistant"})
        part = self.items[-1]["content"][0]
        part["text"] += text
        more = {"logprobs": []} if kind == "content" else {}
        yield self._of_part(f"{part['type']}.delta", delta=text, **more)

    def _begin(self, kind: str | int, item_type: str, prefix: str, known: Json) -> Iterator[Event]:
        yield from self._end("completed")
        self._open = kind
        head = {"type": item_type, "id": f"{prefix}_{len(self.items)}_{self._name}"}
        item = {**head, "status": "in_progress", **known}
        if item_type != "function_call":
            item["content"] = []
        self.items.append(item)
        yield self._of_output("output_item.added", item=_copied(item))
        if item_type != "function_call":
            part: Json = {"type": "reasoning_text", "text": ""}
            if kind == "content":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            yield self._of_part("content_part.added", part=dict(part))

    def _end(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        self._open, item = None, self.items[-1]
        item["status"] = status
        if "arguments" in item:
            name, arguments = item["name"], item["arguments"]
            yield self._of_item("function_call_arguments.done", name=name, arguments=arguments)
        else:
            [part] = item["content"]
            more = {"logprobs": []} if item["type"] == "message" else {}
            yield self._of_part(f"{part['type']}.done", text=part["text"], **more)
            yield self._of_part("content_part.done", part=dict(part))
        yield self._of_output("output_item.done", item=_copied(item))

    def _of_output(self, kind: str, **fields: Any) -> Event:
        return kind, {"output_index": len(self.items) - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return self._of_output(kind, item_id=self.items[-1]["id"], **fields)

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)


class ResponsesAnswer:
    """Builds the JSON of a response; see :class:`absorbed_mla.serving.server.protocol.Answer`."""

    def __init__(
        self, body: ResponsesRequest, model: str, name: str, tokenizer: Tokenizer | None
    ) -> None:
        self._chat = ChatAnswer(body.chat, model, name, tokenizer)
        self._body, self._tokenizer, self._name = body, tokenizer, name
        params = body.params()
        text = body.text.format
        self._head: Json = {
            "id": f"resp_{name}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "max_output_tokens": body.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": {"type": "text"} if text is None else text.model_dump()},
            "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
            "tool_choice": _shown(body.tool_choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "truncation": "disabled",
            # Nothing is kept.
            "store": False,
            "background": False,
            "previous_response_id": None,
        }
        self.output = OutputItems(name)

    def pieces(self) -> ResponsesEvents:
        """For its stream."""
        return ResponsesEvents(self)

    def whole(self, requests: Sequence[RequestOutput]) -> Json:
        """The answer, which has ended."""
        [request] = requests
        now = Snapshot.of(request.outputs[0])
        list(self.grow(request, now))
        list(self.output.end(status_of(now)))
        return self.response(request, now)

    def grow(self, request: RequestOutput, now: Snapshot) -> Iterator[Event]:
        """Events of what the output has more than before."""
        piece = self._chat.parser(0, request).read(now.text, now.finish_reason is not None)
        yield from self.output.add(piece)

    def response(self, request: RequestOutput | None, now: Snapshot | None) -> Json:
        """All that there is so far.

        Args:
            request: The request; None before it has begun.
            now: Its output, at its end; None before.
        """
        status = "in_progress" if now is None else status_of(now)
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        found = {**self._head, "status": status, "incomplete_details": reason}
        found["output"] = self.output.items if now is not None else []
        found["usage"] = None if request is None or now is None else self._usage(request)
        return found

    def _usage(self, request: RequestOutput) -> Json:
        counts = self._chat.usage([request])
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        thought, thinking = self._chat.parser(0, request).message.reasoning, 0
        if thought and self._tokenizer is not None:
            thinking = len(self._tokenizer.encode(thought, begin=False))
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thinking},
            "total_tokens": counts["total_tokens"],
        }


class ResponsesEvents:
    """Builds the events of a streamed response, which has one output.

    Args:
        answer: That is streamed.
    """

    def __init__(self, answer: ResponsesAnswer) -> None:
        self._answer, self._count = answer, 0
        self._request: RequestOutput | None = None
        self._end: Snapshot | None = None

    def of(self, news: Mapping[int, Update]) -> bytes:
        """Events of what has grown."""
        found: list[Event] = []
        for request, [now], _ in news.values():
            if self._request is None:
                begun = {"response": self._answer.response(None, None)}
                found += [("created", begun), ("in_progress", begun)]
            self._request = request
            found += self._answer.grow(request, now)
            self._end = now if now.finish_reason is not None else None
        return self._written(found)

    def last(self) -> bytes:
        """The end."""
        assert self._end is not None
        status = status_of(self._end)
        found = list(self._answer.output.end(status))
        response = self._answer.response(self._request, self._end)
        return self._written([*found, (status, {"response": response})])

    def failed(self, message: str, status: int) -> bytes:
        """The end, if there will be no further output."""
        error = error_body(message, "server_error", status)
        known = {"code": "server_error", "message": message, "param": None}
        return self._of("error", {**known, **error})

    def _written(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._of(f"response.{kind}", fields) for kind, fields in events)

    def _of(self, kind: str, fields: Json) -> bytes:
        content = {"type": kind, "sequence_number": self._count, **fields}
        self._count += 1
        return f"event: {kind}\ndata: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


def status_of(now: Snapshot) -> str:
    """How an output has ended."""
    return "completed" if now.finish_reason == "stop" else "incomplete"


def _copied(item: Json) -> Json:
    """As it is now."""
    return {**item, "content": [*item["content"]]} if "content" in item else dict(item)


def _shown(choice: Any) -> Any:
    return choice.model_dump() if hasattr(choice, "model_dump") else choice or "auto"
