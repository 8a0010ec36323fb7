"""Fields of requests that this server lacks, each with the values that ask for nothing.

Clients send them with null or a default where their users have not asked for anything; any other
value is refused.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

# Field -> its values that ask for nothing, besides null.
_OF_BOTH: dict[str, tuple] = {
    "best_of": (1,),
    "cache_salt": (),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
_OF_COMPLETIONS: dict[str, tuple] = {"suffix": ("",)}
# What is about tools asks for nothing as long as there are none.
_OF_CHAT: dict[str, tuple] = {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def _fields(table: dict[str, tuple]) -> dict[str, Any]:
    return {name: (_asking_for_nothing(accepted), None) for name, accepted in table.items()}


def _asking_for_nothing(accepted: tuple) -> Any:
    """The type of a field that takes these values and null."""
    words = " or ".join([*map(json.dumps, accepted), "null"])

    def check(value: Any) -> Any:
        if value is not None and value not in accepted:
            given = json.dumps(value)
            raise PydanticCustomError(
                "unsupported",
                "must be {words}, got {given}",
                {"words": words, "given": given if len(given) <= 100 else given[:100] + "..."},
            )
        return value

    return Annotated[Any, AfterValidator(check)]


FIELDS_OF_BOTH = _fields(_OF_BOTH) | {
    # They name the client's user, or are hints, on which no answer depends.
    "metadata": (dict[str, Any] | None, None),
    "prompt_cache_key": (str | None, None),
    "prompt_cache_retention": (str | None, None),
    "safety_identifier": (str | None, None),
    "service_tier": (str | None, None),
    "user": (str | None, None),
}
FIELDS_OF_COMPLETIONS = _fields(_OF_COMPLETIONS)
FIELDS_OF_CHAT = _fields(_OF_CHAT)
