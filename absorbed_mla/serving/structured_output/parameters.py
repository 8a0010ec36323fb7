"""What the text of a request must be: a JSON schema, a regular expression, a choice, a grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from absorbed_mla.serving.option_schema import Options, documented, option

# One of them is given.
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
# They are about the text of JSON.
_OF_JSON: dict[str, Any] = {
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
}


def _is_text(given: Any) -> bool:
    return isinstance(given, str)


def _are_choices(texts: Any) -> bool:
    texts = [] if isinstance(texts, str) else list(texts)
    return bool(texts) and all(isinstance(text, str) and text for text in texts)


@documented
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams(Options):
    """What the text of a request must be, under the names that vLLM uses.

    One of ``json``, ``regex``, ``choice``, ``grammar`` and ``json_object`` is given.

    Raises:
        ValueError: On construction, naming the field, what it got and what it accepts.
    """

    # Of the server's requests.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    json: str | Mapping[str, Any] | None = option(
        None,
        valid=lambda given: isinstance(given, str | Mapping),
        accepted="an object, or its text",
        unset="none",
    )
    """JSON schema, also as text."""
    regex: str | None = option(None, valid=_is_text, accepted="a text", unset="none")
    """Regular expression that the whole text matches."""
    # Of a request's JSON, pydantic would report each of millions of wrong entries.
    choice: Sequence[Any] | None = option(
        None, valid=_are_choices, accepted="texts, one at least, none of them empty", unset="none"
    )
    """Texts, of which the output is one."""
    grammar: str | None = option(None, valid=_is_text, accepted="a text", unset="none")
    """Context-free grammar in the format of Lark, or of GBNF."""
    json_object: bool | None = option(None, unset="false")
    """Any JSON object."""
    disable_any_whitespace: bool = option(False)
    """No white space between the parts of JSON."""
    disable_additional_properties: bool = option(False)
    """Objects with ``properties`` have no others, unless the schema says so."""
    whitespace_pattern: str | None = option(
        None, valid=_is_text, accepted="a text", unset="any white space"
    )
    """Regular expression of the white space between the parts of JSON."""
    structural_tag: str | None = option(None, unset="none")
    """Not available: it is refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.structural_tag is not None:
            raise ValueError("structural_tag is not available: use json, regex, choice or grammar")
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(CONSTRAINTS)
            raise ValueError(
                f"structured_outputs must have one of {names}, got {', '.join(given) or 'none'}"
            )
        for name, default in _OF_JSON.items():
            if getattr(self, name) != default and given[0] not in ("json", "json_object"):
                raise ValueError(f"{name} needs json or json_object, got {given[0]}")
