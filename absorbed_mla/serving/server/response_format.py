"""What a request's text must be, as OpenAI's clients ask for it, and vLLM's of former versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from absorbed_mla.serving.structured_output.parameters import StructuredOutputsParams


class JsonSchema(BaseModel):
    """A schema and its name; that it is strict is no matter of choice."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's ``response_format``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """As sampling parameters have it.

        Raises:
            ValueError: If the schema is missing, or is not asked for.
        """
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError(
                "response_format must have json_schema with type 'json_schema', and with no other"
            )
        if self.json_schema is not None:
            return StructuredOutputsParams(json=self.json_schema.schema_)
        return None if self.type == "text" else StructuredOutputsParams(json_object=True)


# Fields of former versions of vLLM -> those of ``structured_outputs``.
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}
FORMAT_FIELDS: dict[str, Any] = {
    "response_format": (ResponseFormat | None, None),
    # ``StructuredOutputsParams`` checks them.
    **dict.fromkeys(_GUIDED, (Any, None)),
}


def structured_outputs_of(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """What the fields of a request ask for.

    Args:
        given: ``structured_outputs`` and :data:`FORMAT_FIELDS`.

    Raises:
        ValueError: If they ask for several things, or are wrong.
    """
    found = {"structured_outputs": given["structured_outputs"]}
    if given["response_format"] is not None:
        found["response_format"] = given["response_format"].structured_outputs()
    former = {new: given[old] for old, new in _GUIDED.items() if given[old] is not None}
    if former:
        found["guided_*"] = StructuredOutputsParams(**former)
    asked = [name for name, one in found.items() if one is not None]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)} must not be given together")
    return found[asked[0]] if asked else None
