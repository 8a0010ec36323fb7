"""Fields of requests that this server lacks, each with the values that ask for nothing.

Clients send them with null or a default where their users have not asked for anything; any other
value is refused.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator

# Field -> its values that ask for nothing, besides null.
_OF_BOTH: dict[str, tuple] = {
    "guided_decoding_backend": (),
    **dict.fromkeys(("kv_transfer_params", "vllm_xargs"), ({},)),
    **dict.fromkeys(("early_stopping", "store", "use_beam_search"), (False,)),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    "spaces_between_special_tokens": (True,),
}
_OF_COMPLETIONS: dict[str, tuple] = {"suffix": ("",)}
_OF_CHAT: dict[str, tuple] = {
    **dict.fromkeys(("audio", "chat_template", "prediction", "reasoning_effort"), ()),
    **dict.fromkeys(("documents", "functions"), ([],)),
    "function_call": ("none", "auto"),
    **dict.fromkeys(("add_special_tokens", "echo"), (False,)),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_OF_RESPONSES: dict[str, tuple] = {
    **dict.fromkeys(("conversation", "max_tool_calls", "moderation", "previous_response_id"), ()),
    **dict.fromkeys(("background", "store"), (False,)),
    **dict.fromkeys(("context_management", "include"), ([],)),
    "prompt": (),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
# They name the client's user, or are hints, on which no answer depends.
_IGNORED = (
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
)


def _fields(table: dict[str, tuple]) -> dict[str, Any]:
    return {name: (_asking_for_nothing(accepted), None) for name, accepted in table.items()}


def _asking_for_nothing(accepted: tuple) -> Any:
    """The type of a field that takes these values and null."""
    words = " or ".join([*map(json.dumps, accepted), "null"])

    def check(value: Any) -> Any:
        # 0 is no false, though Python has them equal.
        same = (one for one in accepted if isinstance(one, bool) == isinstance(value, bool))
        if value is not None and value not in same:
            raise ValueError(f"must be {words}, got {json.dumps(value):.100}")
        return value

    return Annotated[Any, AfterValidator(check)]


IGNORED_FIELDS = {
    **dict.fromkeys(_IGNORED, (str | None, None)),
    "metadata": (dict[str, Any] | None, None),
}
FIELDS_OF_BOTH = {**_fields(_OF_BOTH), **IGNORED_FIELDS}
FIELDS_OF_RESPONSES = {**_fields(_OF_RESPONSES), **IGNORED_FIELDS}
FIELDS_OF_COMPLETIONS, FIELDS_OF_CHAT = _fields(_OF_COMPLETIONS), _fields(_OF_CHAT)
