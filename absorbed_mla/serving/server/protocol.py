"""Requests and answers of OpenAI's interface, as JSON.

Fields are OpenAI's and, for what it lacks, vLLM's; null stands for a field that is not given. A
field that is not here, or a value that asks for something that this server does not do, is refused
(``unsupported.py``).
"""

from __future__ import annotations

import functools
import json
import operator
import time
import types
import typing
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    PrivateAttr,
    create_model,
    model_validator,
)

from absorbed_mla.serving.chat_messages import with_text
from absorbed_mla.serving.llm import LLM, Prompt
from absorbed_mla.serving.llm_engine import required
from absorbed_mla.serving.option_schema import options_of
from absorbed_mla.serving.output_processor import position_logprobs
from absorbed_mla.serving.outputs import PositionLogprobs, RequestOutput
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.server.logprobs import (
    Json,
    TextOffsets,
    chat_logprobs,
    prompt_position,
    text_logprobs,
)
from absorbed_mla.serving.server.response_format import FORMAT_FIELDS, structured_outputs_of
from absorbed_mla.serving.server.service import MakePrompt, Snapshot, Update
from absorbed_mla.serving.server.unsupported import (
    FIELDS_OF_BOTH,
    FIELDS_OF_CHAT,
    FIELDS_OF_COMPLETIONS,
)
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer

_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
# Of all prompts of a request; more would keep the server from its other clients.
_MAX_OUTPUTS = 1024
# Arguments of apply_chat_template that are not the template's, but decide what it returns, or run
# a template of the client's.
_NOT_FOR_CLIENTS = {
    *("chat_template", "conversation", "max_length", "padding", "return_assistant_tokens_mask"),
    *("return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "truncation"),
}
_Item = TypeVar("_Item")


class _Hashable(FailFast):
    """pydantic's mark, for a part of a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


# A list that is refused at its first wrong entry: of millions, each would get an error of its own.
List = Annotated[list[_Item], _Hashable()]
# Fields of SamplingParams that the two routes have in a way of their own.
_OF_A_ROUTE = {"max_tokens", "logprobs"}


def _with_lists(annotation: Any) -> Any:
    """An annotation with lists in place of sequences."""
    kind, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if kind is Sequence:
        return List[arguments[0]]
    if kind in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, map(_with_lists, arguments))
    return annotation


# The others are as they are; SamplingParams checks bounds.
_SAMPLING: dict[str, Any] = {
    name: (_with_lists(one.annotation | None), None)
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
            raise ValueError("Input should be an object")
        fields = cls.model_fields.items()
        no_null = {
            name for name, one in fields if type(None) not in typing.get_args(one.annotation)
        }
        return {k: v for k, v in given.items() if v is not None or k not in no_null}


_OF_BOTH = {**_SAMPLING, **FORMAT_FIELDS, **FIELDS_OF_BOTH}
_OfBoth = create_model("_OfBoth", __base__=KnownFields, **_OF_BOTH)
_OfCompletions = create_model("_OfCompletions", __base__=KnownFields, **FIELDS_OF_COMPLETIONS)
_OfChat = create_model("_OfChat", __base__=KnownFields, **FIELDS_OF_CHAT)


class StreamOptions(KnownFields):
    """Options of a streamed answer."""

    include_usage: bool = False
    # Has every event say how many tokens there are so far.
    continuous_usage_stats: bool = False


class GenerationRequest(_OfBoth):  # type: ignore[valid-type, misc]
    """What both kinds of request have; None takes the default of ``SamplingParams``."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = Field(default=None, le=_MAX_OUTPUTS)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # Part of the answer's id, as the header X-Request-Id is, which wins.
    request_id: str | None = Field(default=None, pattern=r"^[!-~]{1,200}$")
    return_token_ids: bool = False
    # Names them so in log-probabilities.
    return_tokens_as_token_ids: bool = False

    def sampling(self, **fields: Any) -> SamplingParams:
        """Sampling parameters.

        Raises:
            ValueError: Naming the field, what it got and what it accepts.
        """
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs needs stream false")
        given = {name: getattr(self, name) for name in _SAMPLING} | fields
        asked = {name: getattr(self, name) for name in FORMAT_FIELDS}
        if any(value is not None for value in asked.values()):
            given["structured_outputs"] = structured_outputs_of(given | asked)
        return SamplingParams(**{k: v for k, v in given.items() if v is not None or k in fields})


class CompletionRequest(GenerationRequest, _OfCompletions):  # type: ignore[valid-type, misc]
    """Body of ``/v1/completions``."""

    # Token ids before texts: else pydantic would note of each of them that it is no text.
    prompt: str | List[int] | List[str] | List[List[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    # Of prompts that have been made, for an echo: the text, and the first token, whose
    # log-probability nobody knows.
    _echoed: dict[int, tuple[str, PositionLogprobs]] = PrivateAttr(default_factory=dict)

    def prompts(self) -> list[MakePrompt]:
        """One or several.

        Raises:
            ValueError: If there is none, or they ask for too much together.
        """
        if not self.prompt:
            raise ValueError("prompt must not be empty")
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        several: Sequence[Any] = [self.prompt] if one else self.prompt
        if len(several) * (self.n or 1) > _MAX_OUTPUTS:
            raise ValueError(
                f"prompt and n may ask for {_MAX_OUTPUTS} outputs together, got "
                f"{len(several)} times {self.n or 1}"
            )
        return [functools.partial(self._make, i, prompt) for i, prompt in enumerate(several)]

    def _make(self, i: int, prompt: Prompt, llm: LLM) -> Prompt:
        tokens = prompt
        if isinstance(prompt, str) and (self.echo or not self.add_special_tokens):
            begin = None if self.add_special_tokens else False
            if self.truncate_prompt_tokens is None:
                llm.require_few_characters(prompt)
            tokens = required(llm.tokenizer).encode(prompt, begin=begin)
        if self.echo and tokens:
            text = prompt if isinstance(prompt, str) else text_of(tokens, llm.tokenizer)
            self._echoed[i] = text, position_logprobs(tokens[0], 0.0, {}, 0, llm.tokenizer)
        return tokens

    def echoed(self, i: int) -> tuple[str, PositionLogprobs] | None:
        """Text and first token of a prompt, where the answer begins with them."""
        return self._echoed.get(i)

    def params(self) -> SamplingParams:
        """Sampling parameters; see :meth:`sampling`.

        An echo alone, with ``max_tokens`` 0, has a token that is not shown.
        """
        fields: Json = {"max_tokens": self.max_tokens, "logprobs": self.logprobs}
        needs: Json = {"truncate_prompt_tokens": None} if self.echo else {}
        if self.echo and self.max_tokens == 0:
            fields["max_tokens"] = 1
        if self.echo and self.logprobs is not None:
            fields["prompt_logprobs"] = self.logprobs
            needs |= {"stream": False, "prompt_logprobs": None}
        for name, value in needs.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"echo{' with logprobs' * (len(needs) > 1)} needs {name} {_json(value)}, got "
                    f"{_json(getattr(self, name))}"
                )
        return self.sampling(**fields)


def text_of(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """The text of tokens, special ones included; without a tokenizer there is none."""
    if tokenizer is None:
        return ""
    stream = tokenizer.stream((), skip_special_tokens=False)
    return stream.push(list(tokens)) + stream.finish()


class TextPart(KnownFields):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation; the chat template sees all of its fields."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | List[TextPart] | None = None

    def for_template(self) -> Json:
        """With its text as one string."""
        return with_text(self.model_dump(exclude_none=True))


class Conversation(KnownFields):
    """Messages for the chat template, and what it makes of them."""

    messages: List[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Json | None = None

    def token_ids(self, llm: LLM) -> list[int]:
        """Token ids of the conversation.

        Raises:
            ValueError: If the model has no chat template, or ``chat_template_kwargs`` has what is
                not for it, or the last message cannot be continued.
        """
        given = self.chat_template_kwargs or {}
        refused = sorted(_NOT_FOR_CLIENTS & set(given))
        if refused:
            raise ValueError(f"chat_template_kwargs must not have {', '.join(refused)}")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "continue_final_message needs add_generation_prompt false: either the last message "
                "goes on or another one begins"
            )
        if llm.tokenizer is None:
            raise ValueError("the model came without a tokenizer, which chat needs")
        names = ("add_generation_prompt", "continue_final_message")
        options = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        messages = [message.for_template() for message in self.messages]
        return llm.encode_chat(messages, {**options, **given})


class ChatRequest(GenerationRequest, Conversation, _OfChat):  # type: ignore[valid-type, misc]
    """Body of ``/v1/chat/completions``."""

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def prompts(self) -> list[MakePrompt]:
        """The conversation."""
        return [self.token_ids]

    def params(self) -> SamplingParams:
        """Sampling parameters; see :meth:`sampling`.

        Raises:
            ValueError: If ``top_logprobs`` is given without ``logprobs``.
        """
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs true")
        limit = self.max_completion_tokens
        limit = self.max_tokens if limit is None else limit
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(max_tokens=limit, logprobs=logprobs)


class TokenizeRequest(Conversation):
    """Body of ``/tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: List[Message] | None = Field(default=None, min_length=1)  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    def answer(self, llm: LLM) -> Json:
        """Its tokens.

        Raises:
            ValueError: If they cannot be found.
        """
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("one of prompt and messages must be given")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens must be false or null with messages, got true")
        tokenizer = required(llm.tokenizer)
        if self.prompt is None:
            tokens = self.token_ids(llm)
        else:
            begin = False if self.add_special_tokens is False else None
            tokens = tokenizer.encode(self.prompt, begin=begin)
        found = {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens}
        texts = list(map(tokenizer.token_text, tokens)) if self.return_token_strs else None
        return {**found, "token_strs": texts}


class DetokenizeRequest(KnownFields):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: List[int]

    def answer(self, llm: LLM) -> Json:
        """Its text.

        Raises:
            ValueError: If a token is not the tokenizer's.
        """
        tokenizer = required(llm.tokenizer)
        for token in self.tokens:
            if not 0 <= token < tokenizer.vocab_size:
                raise ValueError(f"tokens must be below {tokenizer.vocab_size}, got {token}")
        return {"prompt": text_of(self.tokens, tokenizer)}


class Answer:
    """Builds the JSON of an answer, whole or in pieces.

    Args:
        body: What was asked for; also an attribute.
        model: Name of the model.
        name: Of the request, which is part of the answer's id.

    Attributes:
        head: What it begins with.
    """

    def __init__(self, body: CompletionRequest | ChatRequest, model: str, name: str) -> None:
        self.body, self._chat = body, isinstance(body, ChatRequest)
        # An echo without a token of its own.
        self._hidden = not self._chat and body.max_tokens == 0
        self.head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{name}",
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        # By output.
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)

    def whole(self, requests: Sequence[RequestOutput]) -> Json:
        """The answer to prompts whose outputs have all ended."""
        choices = []
        for i, request in enumerate(requests):
            for one in request.outputs:
                choice = self.choice(i, request, one.index, None, Snapshot.of(one), "message")
                if self.body.prompt_logprobs is not None and request.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = [
                        None if place is None else prompt_position(place)
                        for place in request.prompt_logprobs
                    ]
                choices.append(choice)
        content = {**self.head, "choices": choices, "usage": self.usage(requests)}
        return content | self.of_prompt(requests[0])

    def choice(
        self,
        i: int,
        request: RequestOutput,
        output: int,
        before: Snapshot | None,
        now: Snapshot,
        name: str = "delta",
    ) -> Json:
        """The choice with what an output has more than before.

        Args:
            i: Number of the prompt.
            request: Of the prompt.
            output: Number of the output among those of its prompt.
            before: None: nothing of it has been sent.
            name: Of what it says, in a chat.
        """
        if self._hidden:
            finish = now.finish_reason and "length"
            now = Snapshot("", 0, now.logprobs, finish, None, now.token_ids)
        index = i * len(request.outputs) + output
        start = before.num_tokens if before else 0
        text = now.text[len(before.text) if before else 0 :]
        logprobs = None if now.logprobs is None else now.logprobs[start : now.num_tokens]
        by_id = self.body.return_tokens_as_token_ids
        shown = None
        if isinstance(self.body, ChatRequest):
            content: Json = {} if before else {"role": "assistant"}
            content = {name: {**content, "content": text}}
            if logprobs is not None:
                shown = chat_logprobs(logprobs, by_id=by_id)
        else:
            whole, first = (None if before else self.body.echoed(i)) or (None, None)
            content = {"text": text if whole is None else whole + text}
            if logprobs is not None:
                if first is not None:
                    of_prompt = [one for one in request.prompt_logprobs or () if one is not None]
                    logprobs, whole = [first, *of_prompt, *logprobs], content["text"]
                offsets = self._offsets[index]
                shown = text_logprobs(logprobs, offsets, by_id=by_id, echoed=whole)
        # OpenAI has no such end: an event with the error comes next.
        finish = None if now.finish_reason == "error" else now.finish_reason
        choice = {"index": index, **content, "logprobs": shown, "finish_reason": finish}
        choice["stop_reason"] = now.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = now.token_ids[start : now.num_tokens]
            if not self._chat and before is None:
                choice["prompt_token_ids"] = request.prompt_token_ids
        return choice

    def of_prompt(self, request: RequestOutput) -> Json:
        """What an answer has beside choices and usage, once."""
        shown = self._chat and self.body.return_token_ids
        return {"prompt_token_ids": request.prompt_token_ids} if shown else {}

    def usage(self, requests: Collection[RequestOutput]) -> Json:
        """Numbers of tokens."""
        prompt = sum(len(request.prompt_token_ids) for request in requests)
        generated = sum(len(one.token_ids) for request in requests for one in request.outputs)
        # A prompt's last token is computed, also if the cache has its block.
        cached = (
            min(request.num_cached_tokens or 0, len(request.prompt_token_ids) - 1)
            for request in requests
        )
        counts = _usage(prompt, 0 if self._hidden else generated)
        return {**counts, "prompt_tokens_details": {"cached_tokens": sum(cached)}}


class Pieces:
    """Builds the events of a streamed answer, which are many.

    Args:
        answer: That is streamed.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer, options = answer, answer.body.stream_options
        self._counts = options.include_usage and options.continuous_usage_stats
        kind = answer.head["object"].replace("chat.completion", "chat.completion.chunk")
        self._begin = f'data: {_json({**answer.head, "object": kind})[:-1]}, "choices": ['
        self._sent: dict[int, Snapshot] = {}
        self._requests: dict[int, RequestOutput] = {}

    def of(self, news: Mapping[int, Update]) -> bytes:
        """An event of each output that has grown or ended."""
        found = []
        for i, (request, outputs, _) in news.items():
            self._requests[i] = request
            for output, now in enumerate(outputs):
                index = i * len(outputs) + output
                before = self._sent.get(index)
                if now != before:
                    self._sent[index] = now
                    choice = _json(self._answer.choice(i, request, output, before, now))
                    more: Json = {} if before else self._answer.of_prompt(request)
                    if self._counts:
                        more["usage"] = _usage(len(request.prompt_token_ids), now.num_tokens)
                    rest = f", {_json(more)[1:]}" if more else "}"
                    found.append(f"{self._begin}{choice}]{rest}\n\n")
        return "".join(found).encode()

    def last(self) -> bytes:
        """The event with the numbers of tokens, after all outputs."""
        usage = _json(self._answer.usage(self._requests.values()))
        return f'{self._begin}], "usage": {usage}}}\n\n'.encode()


def event(content: Json) -> bytes:
    """A server-sent event."""
    return f"data: {_json(content)}\n\n".encode()


def _usage(prompt: int, generated: int) -> Json:
    total = prompt + generated
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": total}


def error_body(message: str, kind: str, status: int) -> Json:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
