"""Requests and answers of OpenAI's interface as JSON, with all of ``/v1/completions``.

Fields are OpenAI's and, for what it lacks, vLLM's; null stands for a field that is not given. A
field that is not here, or a value that asks for something that this server does not do, is refused
(``unsupported.py``).
"""

from __future__ import annotations

import base64
import functools
import io
import json
import operator
import time
import types
import typing
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    PrivateAttr,
    Strict,
    create_model,
    model_validator,
)

from absorbed_mla.serving.llm import LLM, Prompt
from absorbed_mla.serving.option_schema import options_of
from absorbed_mla.serving.output_processor import position_logprobs
from absorbed_mla.serving.outputs import PositionLogprobs, RequestOutput
from absorbed_mla.serving.prompts import required
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.server.logprobs import Json, TextOffsets, prompt_position, text_logprobs
from absorbed_mla.serving.server.request_stream import Snapshot, Update
from absorbed_mla.serving.server.response_format import FORMAT_FIELDS, structured_outputs_of
from absorbed_mla.serving.server.service import MakePrompt
from absorbed_mla.serving.server.unsupported import FIELDS_OF_BOTH, FIELDS_OF_COMPLETIONS
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer

_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
# Of all prompts of a request; more would keep the server from its other clients.
_MAX_OUTPUTS = 1024
_Item = TypeVar("_Item")


class _Hashable(FailFast):
    """pydantic's mark, for a part of a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


# A list that is refused at its first wrong entry: of millions, each would get an error of its own.
List = Annotated[list[_Item], _Hashable()]
# Of a request; smaller ones come earlier.
Priority = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# Fields of SamplingParams that the two routes have in a way of their own.
_OF_A_ROUTE = {"max_tokens", "logprobs"}


def _of_json(annotation: Any) -> Any:
    """An annotation with JSON's lists in place of sequences, and its names that are numbers."""
    kind, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if kind is Sequence:
        return List[arguments[0]]
    if kind is Mapping:
        return dict[Annotated[arguments[0], Strict(False)], arguments[1]]  # type: ignore[misc]
    if kind in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, map(_of_json, arguments))
    return annotation


# The others are as they are; SamplingParams checks bounds.
SAMPLING_FIELDS: dict[str, Any] = {
    name: (_of_json(one.annotation | None), None)
    for name, one in options_of(SamplingParams).items()
    if name not in _OF_A_ROUTE
}


class KnownFields(BaseModel):
    """A JSON object without other fields; null gives a field that has no null its default."""

    # No number is made of a text, nor a truth value of a number.
    model_config = ConfigDict(extra="forbid", strict=True)

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


_OF_BOTH = {**SAMPLING_FIELDS, **FORMAT_FIELDS, **FIELDS_OF_BOTH}
_OfBoth = create_model("_OfBoth", __base__=KnownFields, **_OF_BOTH)
_OfCompletions = create_model("_OfCompletions", __base__=KnownFields, **FIELDS_OF_COMPLETIONS)


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
    cache_salt: str | None = None
    priority: Priority = 0

    def salted(self, prompt: Prompt) -> Prompt:
        """A prompt that shares cached blocks as the request asks for."""
        if self.cache_salt is None:
            return prompt
        kind = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        return {kind: prompt, "cache_salt": self.cache_salt}

    def prompts(self) -> list[MakePrompt]:
        """Those that run; of each kind of request its own."""
        raise NotImplementedError

    def params(self) -> SamplingParams:
        """Sampling parameters; of each kind of request its own."""
        raise NotImplementedError

    def sampling(self, **fields: Any) -> SamplingParams:
        """Sampling parameters.

        Raises:
            ValueError: Naming the field, what it got and what it accepts.
        """
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs needs stream false")
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS} | fields
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
                llm.prompt_encoder.require_few_characters(prompt)
            tokens = required(llm.tokenizer).encode(prompt, begin=begin)
        if self.echo and tokens:
            text = prompt if isinstance(prompt, str) else text_of(tokens, llm.tokenizer)
            self._echoed[i] = text, position_logprobs(tokens[0], 0.0, {}, 0, llm.tokenizer)
        return self.salted(tokens)

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


class Answer:
    """Builds the JSON of an answer to ``/v1/completions``, whole or in pieces.

    Args:
        body: What was asked for; also an attribute.
        model: Name of the model.
        name: Of the request, which is part of the answer's id.
        tokenizer: Of the model.

    Attributes:
        head: What it begins with.
        head_of_pieces: What each event of a stream begins with.
    """

    _prefix, _object, _object_of_pieces = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, body: GenerationRequest, model: str, name: str, tokenizer: Tokenizer | None
    ) -> None:
        self.body, self._tokenizer = body, tokenizer
        # An echo without a token of its own.
        self._hidden = isinstance(body, CompletionRequest) and body.max_tokens == 0
        head = {"id": f"{self._prefix}-{name}", "object": self._object}
        self.head = {**head, "created": int(time.time()), "model": model}
        self.head_of_pieces = {**self.head, "object": self._object_of_pieces}
        # By output.
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)

    def pieces(self) -> Pieces:
        """For its stream."""
        return Pieces(self)

    def whole(self, requests: Sequence[RequestOutput]) -> Json:
        """The answer to prompts whose outputs have all ended."""
        choices = []
        for i, request in enumerate(requests):
            for one in request.outputs:
                choice = self.choice(i, request, one.index, None, Snapshot.of(one), whole=True)
                assert choice is not None
                if self.body.prompt_logprobs is not None and request.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = [
                        None if place is None else prompt_position(place)
                        for place in request.prompt_logprobs
                    ]
                for name in ("routed_experts", "indexer_topk"):
                    if (found := getattr(one, name)) is not None:
                        choice[name] = npy_text(found)
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
        *,
        whole: bool = False,
    ) -> Json | None:
        """The choice with what an output has more than before.

        Args:
            i: Number of the prompt.
            request: Of the prompt.
            output: Number of the output among those of its prompt.
            before: None: nothing of it has been sent.
            whole: Whether the answer is not streamed.

        Returns:
            None if there is nothing to be sent.
        """
        if self._hidden:
            finish = now.finish_reason and "length"
            now = Snapshot("", 0, now.logprobs, finish, None, now.token_ids)
        index = i * len(request.outputs) + output
        start = before.num_tokens if before else 0
        logprobs = None if now.logprobs is None else now.logprobs[start : now.num_tokens]
        said = self._said(i, index, request, before, now, logprobs, whole)
        if said is None:
            return None
        # OpenAI has no such end: an event with the error comes next.
        finish = None if now.finish_reason == "error" else self._finish(index, now)
        choice = {"index": index, **said, "finish_reason": finish, "stop_reason": now.stop_reason}
        if self.body.return_token_ids:
            choice["token_ids"] = now.token_ids[start : now.num_tokens]
            choice |= self._of_first_piece(request) if before is None else {}
        return choice

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
        """Text and log-probabilities; see :meth:`choice`.

        Args:
            index: Of the output among all of the answer.
            logprobs: Of the new tokens.
        """
        text, shown = now.text[len(before.text) if before else 0 :], None
        assert isinstance(self.body, CompletionRequest)
        echoed, first = (None if before else self.body.echoed(i)) or (None, None)
        if echoed is not None:
            echoed = text = echoed + text
        if logprobs is not None:
            if first is not None:
                of_prompt = [one for one in request.prompt_logprobs or () if one is not None]
                logprobs = [first, *of_prompt, *logprobs]
            by_id = self.body.return_tokens_as_token_ids
            shown = text_logprobs(logprobs, self._offsets[index], by_id=by_id, echoed=echoed)
        return {"text": text, "logprobs": shown}

    def _finish(self, index: int, now: Snapshot) -> str | None:
        return now.finish_reason

    def _of_first_piece(self, request: RequestOutput) -> Json:
        return {"prompt_token_ids": request.prompt_token_ids}

    def of_prompt(self, request: RequestOutput) -> Json:
        """What an answer has beside choices and usage, once."""
        return {}

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
        self._with_usage = options.include_usage
        self._counts = options.include_usage and options.continuous_usage_stats
        self._begin = f'data: {_json(answer.head_of_pieces)[:-1]}, "choices": ['
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
                if now == before:
                    continue
                choice = self._answer.choice(i, request, output, before, now)
                if choice is None:
                    continue
                self._sent[index] = now
                more: Json = {} if before else self._answer.of_prompt(request)
                if self._counts:
                    more["usage"] = _usage(len(request.prompt_token_ids), now.num_tokens)
                rest = f", {_json(more)[1:]}" if more else "}"
                found.append(f"{self._begin}{_json(choice)}]{rest}\n\n")
        return "".join(found).encode()

    def last(self) -> bytes:
        """The end, after all outputs, with the numbers of tokens if they are asked for."""
        end = "data: [DONE]\n\n"
        if self._with_usage:
            usage = _json(self._answer.usage(self._requests.values()))
            end = f'{self._begin}], "usage": {usage}}}\n\n{end}'
        return end.encode()

    def failed(self, message: str, status: int) -> bytes:
        """The end, if there will be no further outputs."""
        return event(error_body(message, "server_error", status))


def npy_text(array: Any) -> str:
    """NumPy's array as text, as vLLM has it: base64 of a ``.npy`` file."""
    import numpy

    file = io.BytesIO()
    numpy.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def event(content: Json) -> bytes:
    """A server-sent event."""
    return f"data: {_json(content)}\n\n".encode()


def _usage(prompt: int, generated: int) -> Json:
    total = prompt + generated
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": total}


def error_body(message: str, kind: str, status: int) -> Json:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
