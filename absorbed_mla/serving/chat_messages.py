"""Conversations as users give them, and as chat templates expect them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from absorbed_mla.serving.tokenizers.tokenizers import Message

# Parameters of vLLM's calls. A template would get them as variables, and not look at them.
_NOT_HERE = (
    "chat_template_content_format",
    "lora_request",
    "mm_processor_kwargs",
    "priority",
    "tokenization_kwargs",
)


def with_text(message: Message) -> Message:
    """A message whose content is one text, also if it was given in parts as OpenAI has them.

    Raises:
        ValueError: If a part is no text.
    """
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
    """Check that no option of a call is one of vLLM's that is not here.

    Raises:
        ValueError: Naming those that are.
    """
    refused = [name for name in _NOT_HERE if options.get(name) is not None]
    if refused:
        raise ValueError(f"{call} does not take {', '.join(refused)}")


def template_options_of(
    options: Mapping[str, Any], variables: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Options of ``apply_chat_template``, and variables of the template, in one.

    Raises:
        ValueError: If an option is vLLM's and not here, or both have a name.
    """
    require_none("chat", options)
    variables = variables or {}
    twice = sorted(options.keys() & variables.keys())
    if twice:
        raise ValueError(f"chat_template_kwargs has {', '.join(twice)}, which is an option, too")
    return {**{k: v for k, v in options.items() if k not in _NOT_HERE}, **variables}
