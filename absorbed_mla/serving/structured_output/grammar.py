"""The grammar that structured outputs ask for, as llguidance reads it, and whether it may run."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
import time
from collections.abc import Mapping
from typing import Any

from absorbed_mla.serving.structured_output.parameters import CONSTRAINTS, StructuredOutputsParams
from absorbed_mla.serving.structured_output.vocabulary import TokenVocabulary
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer

# Of a schema, a regular expression, a grammar, or all choices together.
MOST_CHARACTERS = 1 << 16
# What one grammar may take: at most some 10 ms of a step (20,000 items, 100,000 units of fuel),
# 100 MB, and so many seconds of a CPU before its first tokens.
_MOST_SECONDS, _FIRST_TOKENS = 1.0, 3
_LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
# Where the grammar leaves one text only, any tokens of it: one sequence would be the tokenizer's,
# which engines do not have.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# Grammars that are known to run.
_MOST_KNOWN = 1024


def require_library() -> None:
    """Check that llguidance is there.

    Raises:
        ValueError: Naming the extra that brings it.
    """
    if importlib.util.find_spec("llguidance") is None:
        raise ValueError(
            "structured_outputs needs llguidance, which is missing: "
            "pip install 'absorbed-mla[structured]'"
        )


def grammar_of(params: StructuredOutputsParams) -> str:
    """The grammar of structured outputs, in Lark's format as llguidance has it.

    Raises:
        ValueError: If it has too many characters, or is no JSON.
    """
    from llguidance import LLMatcher, grammar_from

    [kind] = [name for name in CONSTRAINTS if getattr(params, name) not in (None, False)]
    given = getattr(params, kind)
    if kind == "json_object":
        given = {"type": "object"}
    if isinstance(given, Mapping):
        given = _as_json(given)
    count = len(given) if isinstance(given, str) else sum(map(len, given))
    if count > MOST_CHARACTERS:
        raise ValueError(f"{kind} must have at most {MOST_CHARACTERS} characters, got {count}")
    if kind == "choice":
        # JSON's strings are Lark's.
        lark = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in given)
    elif kind == "grammar":
        lark = grammar_from("grammar", given)
    elif kind == "regex":
        [made] = json.loads(LLMatcher.grammar_from_regex(given))["grammars"]
        lark = made["lark_grammar"]
    else:
        lark = f"start: %json {_as_json(_schema(given, params))}"
    return lark + _OPTIONS


def matcher_of(grammar: str, tokenizer: Any) -> Any:
    """Matcher of llguidance, whose ``get_error`` says what is wrong with the grammar, if anything.

    Args:
        grammar: From :func:`grammar_of`.
        tokenizer: From :meth:`TokenVocabulary.for_grammars`.
    """
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))


class GrammarChecks:
    """Checks what requests ask for before they run, for any thread.

    Args:
        tokenizer: Of the outputs, if there is one.
        vocab_size: Of the model.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int | None) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._vocabulary: TokenVocabulary | None = None
        self._for_grammars: Any = None
        # Hashes of grammars.
        self._known: dict[bytes, None] = {}
        # What was checked last, such as for another prompt of a request, with its grammar.
        self._last: tuple[StructuredOutputsParams | None, str] = None, ""

    @property
    def vocabulary(self) -> TokenVocabulary:
        """What engines need to know of the tokenizer, after a first :meth:`check`."""
        assert self._vocabulary is not None
        return self._vocabulary

    def check(self, params: StructuredOutputsParams) -> str:
        """Check that requests can run; the first one takes a second or two.

        Returns:
            Their grammar.

        Raises:
            ValueError: If there is no library or no tokenizer, or the grammar is wrong, takes too
                much, or allows no text.
        """
        if params is (last := self._last)[0]:
            return last[1]
        require_library()
        if self._tokenizer is None or self._vocab_size is None:
            raise ValueError("structured_outputs needs a tokenizer")
        try:
            grammar = grammar_of(params)
        except ValueError as error:
            raise ValueError(f"structured_outputs: {error}") from error
        name = hashlib.blake2b(grammar.encode(errors="replace")).digest()
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = TokenVocabulary.of(self._tokenizer, self._vocab_size)
                self._for_grammars = self._vocabulary.for_grammars()
            if name in self._known:
                self._last = params, grammar
                return grammar
        start = time.thread_time()
        if error := _first_error(matcher_of(grammar, self._for_grammars)):
            raise ValueError(f"structured_outputs: {error[:500]}")
        if (seconds := time.thread_time() - start) > _MOST_SECONDS:
            raise ValueError(
                f"structured_outputs takes {seconds:.1f} s of at most {_MOST_SECONDS} to compile"
            )
        with self._lock:
            self._known[name] = None
            while len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]
        self._last = params, grammar
        return grammar


def _first_error(matcher: Any) -> str:
    """What is wrong with the grammar, or happens with its first tokens; or ``""``."""
    for _ in range(_FIRST_TOKENS):
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        place = next((place for place, byte in enumerate(mask) if byte), None)
        if matcher.is_error() or matcher.is_stopped() or place is None:
            break
        # One that is allowed, or the end.
        matcher.consume_token(place * 8 + (mask[place] & -mask[place]).bit_length() - 1)
    return matcher.get_error() if matcher.is_error() else ""


def _schema(text: str, params: StructuredOutputsParams) -> dict[str, Any]:
    """A schema with what structured outputs ask for besides.

    Raises:
        ValueError: If it is no JSON object.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json is no JSON schema: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError(f"json must be an object, got {text:.100}")
    left: list[Any] = [schema] if params.disable_additional_properties else []
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if "properties" in part or "patternProperties" in part:
                part.setdefault("additionalProperties", False)
            left += part.values()
        elif isinstance(part, list):
            left += part
    spaces: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        spaces = {"whitespace_pattern": params.whitespace_pattern}
    # llguidance's own options.
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**(own if isinstance(own, dict) else {}), **spaces}}


def _as_json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json is no JSON schema: {error}") from error
