"""Requests of ``/v1/responses``, which are those of a chat with other names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag, create_model

from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.server.chat_request import ChatRequest, Function
from absorbed_mla.serving.server.output_parsers import OutputParsers
from absorbed_mla.serving.server.protocol import (
    SAMPLING_FIELDS,
    KnownFields,
    List,
    Priority,
)
from absorbed_mla.serving.server.service import MakePrompt
from absorbed_mla.serving.server.unsupported import FIELDS_OF_RESPONSES

Json = dict[str, Any]
# A response has one output, and neither log-probabilities nor choices of layers.
_NOT_HERE = {"n", "prompt_logprobs", "routed_experts_prompt_start", "indexer_topk_prompt_start"}
_SAMPLING = {name: field for name, field in SAMPLING_FIELDS.items() if name not in _NOT_HERE}
_OfResponses = create_model(
    "_OfResponses", __base__=KnownFields, **{**_SAMPLING, **FIELDS_OF_RESPONSES}
)


class _Item(BaseModel):
    """Part of the input. Items of former answers come with what only those need, such as ids."""

    model_config = ConfigDict(extra="ignore", strict=True)


class InputText(_Item):
    """Text of an item."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str


class InputMessage(_Item):
    """What somebody has said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | List[InputText]


class InputReasoning(_Item):
    """What the model has thought."""

    type: Literal["reasoning"]
    content: List[InputText] | None = None


class InputCall(_Item):
    """A tool call of the model's."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputCallOutput(_Item):
    """What a tool has answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | List[InputText]


def _kind_of(item: Any) -> Any:
    """The type of an item, of which that of a message may be left out."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")],
    Discriminator(_kind_of),
]


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunction(KnownFields):
    """The function that the model is to call."""

    type: Literal["function"]
    name: str


class TextFormat(_Item):
    """What the text is to be; a schema of JSON has ``schema`` and a name."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(KnownFields):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(_OfResponses):  # type: ignore[valid-type, misc]
    """Body of ``/v1/responses``."""

    model: str | None = None
    input: str | List[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool = False
    text: TextOptions = TextOptions()
    tools: List[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: Json | None = None
    priority: Priority = 0
    request_id: str | None = Field(default=None, pattern=r"^[!-~]{1,200}$")
    _chat: ChatRequest | None = PrivateAttr(default=None)

    @property
    def chat(self) -> ChatRequest:
        """The same as a chat.

        Raises:
            ValueError: Naming the chat's field, if it cannot be one.
        """
        if self._chat is None:
            given = {name: getattr(self, name) for name in _SAMPLING}
            given |= {"messages": self._messages(), "max_tokens": self.max_output_tokens}
            for name in ("stream", "parallel_tool_calls", "chat_template_kwargs"):
                given[name] = getattr(self, name)
            tools = [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]
            given["tools"] = [{"type": tool.pop("type"), "function": tool} for tool in tools]
            choice = self.tool_choice
            if isinstance(choice, NamedFunction):
                choice = {"type": "function", "function": {"name": choice.name}}
            given["tool_choice"] = choice
            if self.text.format is not None:
                form = self.text.format.model_dump()
                kind = form.pop("type")
                schema = {"json_schema": form} if kind == "json_schema" else {}
                given["response_format"] = {"type": kind, **schema}
            # Types have been checked.
            self._chat = ChatRequest.model_validate(given, strict=False)
        return self._chat

    def use(self, parsers: OutputParsers) -> None:
        """See :class:`ChatRequest`."""
        self.chat.use(parsers)

    def prompts(self) -> list[MakePrompt]:
        """The conversation."""
        return self.chat.prompts()

    def params(self) -> SamplingParams:
        """Sampling parameters."""
        return self.chat.params()

    def _messages(self) -> list[Json]:
        """The input as a conversation; what an assistant thinks, says and calls is one message."""
        made: list[Json] = []
        if self.instructions is not None:
            made.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*made, {"role": "user", "content": self.input}]
        for item in self.input:
            last = made[-1] if made and made[-1]["role"] == "assistant" else None
            match item:
                case InputMessage(role="assistant"):
                    if last is None or len(last.keys() & {"content", "tool_calls"}):
                        made.append(last := {"role": "assistant"})
                    last["content"] = _text_of(item.content)
                case InputMessage():
                    role = "system" if item.role == "developer" else item.role
                    made.append({"role": role, "content": _text_of(item.content)})
                case InputReasoning():
                    thought = _text_of(item.content or [])
                    made.append({"role": "assistant", "reasoning_content": thought})
                case InputCall():
                    if last is None:
                        made.append(last := {"role": "assistant"})
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    last.setdefault("tool_calls", []).append(call)
                case InputCallOutput():
                    text = _text_of(item.output)
                    made.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        return made


def _text_of(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
