"""Prompts as users give them, and as the engine takes them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# A text; token ids, also as an array of numpy or a tensor; or either as vLLM's dicts have it,
# {"prompt": text} and {"prompt_token_ids": token ids}.
Prompt = str | Sequence[int] | Mapping[str, Any] | Any

_TEXT, _TOKENS = "prompt", "prompt_token_ids"


def prompts_of(given: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One or several prompts as a list; the rows of a matrix are several."""
    if isinstance(given, str | Mapping):
        return [given]
    prompts = _without_array(given)
    # Arrays in a list have an index, too, if they have one number.
    if prompts and hasattr(prompts[0], "__index__") and not getattr(prompts[0], "ndim", 0):
        return [prompts]
    return prompts


def text_and_tokens(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """A prompt's text and token ids, of which a dict may have both.

    Raises:
        ValueError: If it is no prompt, or asks for more than a text.
    """
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, _token_ids(prompt)
    others = sorted(k for k, v in prompt.items() if k not in (_TEXT, _TOKENS) and v is not None)
    text, tokens = prompt.get(_TEXT), prompt.get(_TOKENS)
    if others or (text is None and tokens is None) or not isinstance(text, str | None):
        raise ValueError(
            f"a prompt's dict must have {_TEXT!r}, a text, or {_TOKENS!r}, and nothing else, got "
            f"{prompt!r:.200}"
        )
    return text, None if tokens is None else _token_ids(tokens)


def _token_ids(given: Any) -> list[int]:
    try:
        return list(map(operator.index, _without_array(given)))
    except TypeError as error:
        raise ValueError(f"token ids must be integers, got {given!r:.200}") from error


def _without_array(given: Any) -> list:
    """A list, with Python's numbers in place of an array's."""
    return given.tolist() if hasattr(given, "tolist") else list(given)
