"""Conversations as users give them, and as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

# Parameters of vLLM's calls. A template would get them as variables, and not look at them.
_NOT_HERE = (
    "chat_template_content_format",
    "mm_processor_kwargs",
    "priority",
    "tokenization_kwargs",
)


def for_template(message: Message) -> Message:
    """A message as chat templates read it, of one as OpenAI's interface has it.

    Content in parts becomes one text, the arguments of tool calls become dicts, and ``reasoning``
    is ``reasoning_content``, too.

    Raises:
        ValueError: If a part is no text, or arguments are no JSON object.
    """
    message = _with_text(message)
    if message.get("tool_calls"):
        message = {**message, "tool_calls": list(map(_with_dict, message["tool_calls"]))}
    if "reasoning" in message:
        message = {"reasoning_content": message["reasoning"], **message}
    return message


def _with_dict(call: Any) -> Any:
    """A tool call with its arguments as a dict."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a message's tool_calls must have function.name, got {call!r:.200}")
    found = function.get("arguments") or {}
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            found = None
    if not isinstance(found, Mapping):
        raise ValueError(
            "arguments of a message's tool_calls must be a JSON object, got "
            f"{function['arguments']!r:.200}"
        )
    return {**call, "function": {**function, "arguments": found}}


def with_argument_texts(messages: Sequence[Message]) -> list[Message]:
    """Messages with the arguments of tool calls as JSON, for templates that join texts."""
    made = []
    for message in messages:
        calls = [
            {**call, "function": {**function, "arguments": _json(function["arguments"])}}
            for call in message.get("tool_calls") or ()
            for function in [call["function"]]
        ]
        made.append({**message, "tool_calls": calls} if calls else message)
    return made


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_text(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": "".join(map(_text_of, content))}


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ValueError(
        "a part of a message's content must be a text or {'type': 'text', 'text': ...}, "
        f"got {part!r:.200}"
    )


def require_none(call: str, options: Mapping[str, Any]) -> None:
    """Refuse those of a call's options that vLLM has and this package does not.

    Raises:
        ValueError: Naming those that are.
    """
    refused = [name for name in _NOT_HERE if options.get(name) is not None]
    if refused:
        raise ValueError(f"{call} does not take {', '.join(refused)}")


def template_options_of(
    options: Mapping[str, Any], variables: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Arguments of ``apply_chat_template``: its options, and the template's variables.

    Raises:
        ValueError: If an option is vLLM's and not here, or both have a name.
    """
    require_none("chat", options)
    variables = variables or {}
    twice = sorted(options.keys() & variables.keys())
    if twice:
        raise ValueError(f"chat_template_kwargs has {', '.join(twice)}, which is an option, too")
    return {**{k: v for k, v in options.items() if k not in _NOT_HERE}, **variables}
