"""Requests and answers of OpenAI's interface, as JSON.

Fields are OpenAI's and, for what it lacks, vLLM's; null stands for a field that is not given. A
field that is not here, or a value that asks for something that this server does not do, is refused
(``unsupported.py``).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from absorbed_mla.serving.chat_messages import with_text
from absorbed_mla.serving.llm import LLM, Prompt
from absorbed_mla.serving.option_schema import options_of
from absorbed_mla.serving.outputs import PositionLogprobs, RequestOutput
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.server.logprobs import Json, chat_logprobs, prompt_position, text_logprobs
from absorbed_mla.serving.server.service import Snapshot, Update
from absorbed_mla.serving.server.unsupported import (
    FIELDS_OF_BOTH,
    FIELDS_OF_CHAT,
    FIELDS_OF_COMPLETIONS,
)

_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
# Of all prompts of a request; more would keep the server from its other clients.
_MAX_OUTPUTS = 1024
# Arguments of apply_chat_template that are not the template's, but decide what it returns, or run
# a template of the client's.
_NOT_FOR_CLIENTS = {
    *("chat_template", "conversation", "max_length", "padding", "return_assistant_tokens_mask"),
    *("return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "truncation"),
}
# Fields of SamplingParams that the two routes have in a way of their own.
_OF_A_ROUTE = {"max_tokens", "logprobs"}
# The others are as they are; SamplingParams checks bounds.
_SAMPLING: dict[str, Any] = {
    name: (one.annotation | None, None)
    for name, one in options_of(SamplingParams).items()
    if name not in _OF_A_ROUTE
}


class KnownFields(BaseModel):
    """A JSON object without other fields; null gives a field that has no null its default."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise PydanticCustomError("object", "Input should be an object")
        known = cls.model_fields
        dropped = {
            name
            for name, value in given.items()
            if value is None and name in known and not _has_null(known[name].annotation)
        }
        return {name: value for name, value in given.items() if name not in dropped}


def _has_null(annotation: Any) -> bool:
    return type(None) in get_args(annotation)


_FieldsOfBoth = create_model(
    "_FieldsOfBoth", __base__=KnownFields, **{**_SAMPLING, **FIELDS_OF_BOTH}
)
_FieldsOfCompletions = create_model(
    "_FieldsOfCompletions", __base__=KnownFields, **FIELDS_OF_COMPLETIONS
)
_FieldsOfChat = create_model("_FieldsOfChat", __base__=KnownFields, **FIELDS_OF_CHAT)


class StreamOptions(KnownFields):
    """Options of a streamed answer."""

    include_usage: bool = False
    # Has every event say how many tokens there are so far.
    continuous_usage_stats: bool = False


class GenerationRequest(_FieldsOfBoth):  # type: ignore[valid-type, misc]
    """What both kinds of request have; None takes the default of ``SamplingParams``."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = Field(default=None, le=_MAX_OUTPUTS)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def sampling(self, **fields: Any) -> SamplingParams:
        """Sampling parameters.

        Raises:
            ValueError: Naming the field, what it got and what it accepts.
        """
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs needs stream false")
        given = {name: getattr(self, name) for name in _SAMPLING}
        return SamplingParams(**{k: v for k, v in given.items() if v is not None}, **fields)


class CompletionRequest(GenerationRequest, _FieldsOfCompletions):  # type: ignore[valid-type, misc]
    """Body of ``/v1/completions``."""

    # Token ids before texts: else pydantic would note of each of them that it is no text.
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: Literal[False] = False

    def prompts(self) -> list[Prompt]:
        """One or several.

        Raises:
            ValueError: If there is none.
        """
        if not self.prompt:
            raise ValueError("prompt must not be empty")
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) * (self.n or 1) > _MAX_OUTPUTS:
            raise ValueError(
                f"prompt and n may ask for {_MAX_OUTPUTS} outputs together, got "
                f"{len(self.prompt)} times {self.n or 1}"
            )
        return list(self.prompt)

    def params(self) -> SamplingParams:
        """Sampling parameters; see :meth:`sampling`."""
        return self.sampling(max_tokens=self.max_tokens, logprobs=self.logprobs)


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation; the chat template sees all of its fields."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> Json:
        """With its text as one string."""
        return with_text(self.model_dump(exclude_none=True))


class ChatRequest(GenerationRequest, _FieldsOfChat):  # type: ignore[valid-type, misc]
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: Json | None = None

    def prompt(self, llm: LLM) -> Prompt:
        """Token ids of the conversation.

        Raises:
            ValueError: If the model has no chat template.
        """
        if llm.tokenizer is None:
            raise ValueError("the model came without a tokenizer, which chat needs")
        messages = [message.for_template() for message in self.messages]
        return llm.tokenizer.chat(messages, **(self.chat_template_kwargs or {}))

    def params(self) -> SamplingParams:
        """Sampling parameters; see :meth:`sampling`.

        Raises:
            ValueError: If ``top_logprobs`` is given without ``logprobs``, or
                ``chat_template_kwargs`` has what is not for the template.
        """
        refused = sorted(_NOT_FOR_CLIENTS & set(self.chat_template_kwargs or {}))
        if refused:
            raise ValueError(f"chat_template_kwargs must not have {', '.join(refused)}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs true")
        limit = self.max_completion_tokens
        limit = self.max_tokens if limit is None else limit
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(max_tokens=limit, logprobs=logprobs)


class Answer:
    """Builds the JSON of an answer, whole or in pieces.

    Args:
        kind: ``"chat.completion"`` or ``"text_completion"``.
        model: Name of the model.
    """

    def __init__(self, kind: str, model: str) -> None:
        self._chat = kind == "chat.completion"
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, requests: Sequence[RequestOutput]) -> Json:
        """The answer to prompts whose outputs have all ended."""
        choices = []
        for i, request in enumerate(requests):
            for one in request.outputs:
                content = self._content(one.text, role="assistant")
                index = i * len(request.outputs) + one.index
                choice = self._choice(index, content, one.finish_reason, one.logprobs, "message")
                if request.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = [
                        None if place is None else prompt_position(place)
                        for place in request.prompt_logprobs
                    ]
                choices.append(choice)
        return {**self._head, "choices": choices, "usage": usage(requests)}

    def choice(self, index: int, before: Snapshot | None, now: Snapshot) -> Json:
        """The choice with what an output has more than before."""
        text = now.text[len(before.text) if before else 0 :]
        start = before.num_tokens if before else 0
        logprobs = None if now.logprobs is None else now.logprobs[start : now.num_tokens]
        content = self._content(text, role=None if before else "assistant")
        # OpenAI has no such end: an event with the error comes next.
        finish = None if now.finish_reason == "error" else now.finish_reason
        return self._choice(index, content, finish, logprobs, "delta")

    def streamed(self) -> Json:
        """What all pieces have, beside choices and usage."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind}

    def _content(self, text: str, role: str | None) -> Json:
        if not self._chat:
            return {"text": text}
        return {"content": text} if role is None else {"role": role, "content": text}

    def _choice(
        self,
        index: int,
        content: Json,
        finish_reason: str | None,
        logprobs: list[PositionLogprobs] | None,
        name: str,
    ) -> Json:
        shown = None
        if logprobs is not None:
            shown = chat_logprobs(logprobs) if self._chat else text_logprobs(logprobs)
        body = {name: content} if self._chat else content
        return {"index": index, **body, "logprobs": shown, "finish_reason": finish_reason}


class Pieces:
    """Builds the events of a streamed answer, which are many.

    Args:
        answer: That is streamed.
        n: Outputs of each prompt.
        options: Of the stream.
    """

    def __init__(self, answer: Answer, n: int, options: StreamOptions) -> None:
        self._answer, self._n = answer, n
        self._counts = options.include_usage and options.continuous_usage_stats
        self._begin = f'data: {_json(answer.streamed())[:-1]}, "choices": ['
        self._sent: dict[int, Snapshot] = {}
        self._requests: dict[int, RequestOutput] = {}

    def of(self, news: Mapping[int, Update]) -> bytes:
        """An event of each output that has grown or ended."""
        found = []
        for i, (request, outputs, _) in news.items():
            self._requests[i] = request
            for index, now in enumerate(outputs, i * self._n):
                before = self._sent.get(index)
                if now != before:
                    self._sent[index] = now
                    choice = _json(self._answer.choice(index, before, now))
                    more = ""
                    if self._counts:
                        counts = token_counts(len(request.prompt_token_ids), now.num_tokens)
                        more = f', "usage": {_json(counts)}'
                    found.append(f"{self._begin}{choice}]{more}}}\n\n")
        return "".join(found).encode()

    def last(self) -> bytes:
        """The event with the numbers of tokens, after all outputs."""
        return f'{self._begin}], "usage": {_json(usage(self._requests.values()))}}}\n\n'.encode()


def event(content: Json) -> bytes:
    """A server-sent event."""
    return f"data: {_json(content)}\n\n".encode()


def usage(requests: Collection[RequestOutput]) -> Json:
    """Numbers of tokens."""
    prompt = sum(len(request.prompt_token_ids) for request in requests)
    generated = sum(len(one.token_ids) for request in requests for one in request.outputs)
    return token_counts(prompt, generated)


def token_counts(prompt: int, generated: int) -> Json:
    """Numbers of tokens as JSON."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


def error_body(message: str, kind: str, status: int) -> Json:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
