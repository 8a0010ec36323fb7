"""Requests of ``/v1/chat/completions``: a conversation, tools, and what becomes of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, create_model

from absorbed_mla.serving.chat_messages import for_template
from absorbed_mla.serving.llm import LLM
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.server.forced_calls import (
    ListedCalls,
    NamedCall,
    schema_of_one,
    schema_of_several,
)
from absorbed_mla.serving.server.message_parts import MessageParser, Parser
from absorbed_mla.serving.server.output_parsers import OutputParsers
from absorbed_mla.serving.server.protocol import GenerationRequest, KnownFields, List, text_of
from absorbed_mla.serving.server.reasoning import BEGIN, END, ReasoningParser
from absorbed_mla.serving.server.service import MakePrompt
from absorbed_mla.serving.server.unsupported import FIELDS_OF_CHAT
from absorbed_mla.serving.structured_output.parameters import StructuredOutputsParams
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer

Json = dict[str, Any]
# Arguments of apply_chat_template that are not the template's, but decide what it returns, or run
# a template of the client's.
_NOT_FOR_CLIENTS = {
    *("chat_template", "conversation", "max_length", "padding", "return_assistant_tokens_mask"),
    *("return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "truncation"),
}
# Tokens at the end of a prompt that say how the answer begins.
_PROMPT_END = 16
_MARKS = re.compile(f"{BEGIN}|{END}")
_OfChat = create_model("_OfChat", __base__=KnownFields, **FIELDS_OF_CHAT)


class TextPart(KnownFields):
    """A part of a message."""

    type: Literal["text"]
    text: str


class _ForTemplate(BaseModel):
    """An object of which the chat template sees all fields."""

    model_config = ConfigDict(extra="allow", strict=True)


class Message(_ForTemplate):
    """One message of a conversation."""

    role: str
    content: str | List[TextPart] | None = None

    def for_template(self) -> Json:
        """With its text as one string."""
        return for_template(self.model_dump(exclude_none=True))


class Function(_ForTemplate):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[^\s<>\"|]{1,128}$")
    description: str | None = None
    parameters: Json | None = None


class Tool(_ForTemplate):
    """A tool, of which there is one type."""

    type: Literal["function"]
    function: Function


class FunctionName(KnownFields):
    """A function by its name."""

    name: str


class NamedTool(KnownFields):
    """The tool that the model is to call."""

    type: Literal["function"]
    function: FunctionName


class Conversation(KnownFields):
    """Messages for the chat template, and what it makes of them."""

    messages: List[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Json | None = None
    tools: List[Tool] | None = None

    @functools.cached_property
    def tools_as_json(self) -> list[Json]:
        """The tools as the client gave them; of up to 1,024 outputs, each has a parser of them."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]

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
        if self.tools:
            options["tools"] = self.tools_as_json
        messages = [message.for_template() for message in self.messages]
        return llm.prompt_encoder.encode_chat(messages, {**options, **given})


class ChatRequest(GenerationRequest, Conversation, _OfChat):  # type: ignore[valid-type, misc]
    """Body of ``/v1/chat/completions``."""

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    _parsers: OutputParsers = PrivateAttr(default_factory=OutputParsers)
    _is_structured: bool = PrivateAttr(default=False)

    def use(self, parsers: OutputParsers) -> None:
        """Take the server's parsers of tool calls and reasoning, which divide the answer.

        Raises:
            ValueError: If a field needs one that is not there, or ``tools``.
        """
        self._parsers = parsers
        choice = self._choice
        if not self.include_reasoning and parsers.reasoning is None:
            raise ValueError("include_reasoning false needs the server's option reasoning_parser")
        if not self.tools:
            if choice not in ("none", "auto"):
                raise ValueError(f"tool_choice {choice!r} needs tools")
        elif choice == "auto":
            parsers.require_tools()
        elif self.is_named and choice not in [tool.function.name for tool in self.tools]:
            raise ValueError(f"tool_choice must name one of the tools, got {choice!r}")

    @property
    def is_named(self) -> bool:
        """Whether the model is to call a certain function."""
        return isinstance(self.tool_choice, NamedTool)

    @property
    def _choice(self) -> str:
        """``tool_choice``, or the name of the function that it asks for."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        return self.tool_choice or "auto"

    @property
    def _is_forced(self) -> bool:
        return bool(self.tools) and (self.is_named or self._choice == "required")

    def _reasoning(self, prompt: Sequence[int], tokenizer: Tokenizer) -> ReasoningParser:
        assert self._parsers.reasoning is not None
        end = text_of(prompt[-_PROMPT_END:], tokenizer)
        if self.continue_final_message:
            marks = _MARKS.findall(self.messages[-1].for_template().get("content", ""))
            end = marks[-1] if marks else end
        given = self.chat_template_kwargs or {}
        return self._parsers.reasoning.parser(end, given, structured=self._is_structured)

    def _reasoning_ends(self, prompt: Sequence[int], tokenizer: Tokenizer) -> list[list[int]]:
        return self._reasoning(prompt, tokenizer).ends(tokenizer)

    def message_parser(self, prompt: Sequence[int], tokenizer: Tokenizer) -> MessageParser:
        """What finds the parts of an output's message.

        Args:
            prompt: Token ids.
            tokenizer: Of the model.
        """
        reasoning: Parser | None = None
        calls: Parser | None = None
        if self._parsers.reasoning is not None:
            reasoning = self._reasoning(prompt, tokenizer)
        if self._is_forced:
            calls = NamedCall(self._choice) if self.is_named else ListedCalls()
        elif self.tools and self._choice == "auto":
            calls = self._parsers.require_tools().parser(self.tools_as_json)
        return MessageParser(
            reasoning,
            calls,
            most_calls=None if self.parallel_tool_calls else 1,
            with_reasoning=self.include_reasoning,
        )

    def prompts(self) -> list[MakePrompt]:
        """The conversation."""
        return [lambda llm: self.salted(self.token_ids(llm))]

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
        fields: Json = {"max_tokens": limit, "logprobs": logprobs}
        uses_tools = bool(self.tools) and self._choice != "none"
        if uses_tools or self._parsers.reasoning is not None:
            # Marks may be special tokens.
            fields["skip_special_tokens"] = False
        if self._is_forced:
            if self.structured_outputs is not None:
                raise ValueError("tool_choice and structured_outputs must not be given together")
            fields["structured_outputs"] = StructuredOutputsParams(json=self._schema_of_calls())
        params = self.sampling(**fields)
        self._is_structured = params.structured_outputs is not None
        if self._is_structured and self._parsers.reasoning is not None:
            return params.derived(find_reasoning_ends=self._reasoning_ends)
        return params

    def _schema_of_calls(self) -> Json:
        tools = self.tools_as_json
        if self.is_named:
            return schema_of_one(next(t for t in tools if t["function"]["name"] == self._choice))
        return schema_of_several(tools, None if self.parallel_tool_calls else 1)
