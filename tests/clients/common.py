"""What clients ask for: an answer of bounded length, whatever the model would say."""

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict

ASK = [{"role": "user", "content": "Where is it warm?"}]
TOWNS = ("Athens", "Oslo")
PARAMETERS = {
    "type": "object",
    "properties": {"town": {"type": "string", "enum": list(TOWNS)}},
    "required": ["town"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Its weather.", "parameters": PARAMETERS},
    }
]


class Answer(BaseModel):
    """Structured output."""

    model_config = ConfigDict(extra="forbid")
    town: Literal["Athens", "Oslo"]
    warm: bool


def are_arguments(arguments: str) -> bool:
    """Whether these are arguments of the tool."""
    return json.loads(arguments) in [{"town": town} for town in TOWNS]
