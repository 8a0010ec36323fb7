"""Structured outputs of tiny models, whose other outputs are junk, and what is valid of them."""

import json
import random
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from absorbed_mla import SamplingParams, StructuredOutputsParams
from absorbed_mla.serving.request_results import Result
from absorbed_mla.serving.structured_output.vocabulary import TokenVocabulary
from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer
from tests.support.models import VOCAB

# The last token ends a text, and those before it have none.
_TEXTS = [*'abcdefhilnrstuxyz{}[]":,-. \n0123456789\\', '{"', '":', '",', '"a', "}]", "true", "ab"]
_TEXTS += ["12", "null", "false", "xyz", "A", "é", "☃"]
# Both parts of a character.
TOKENS = (*(text.encode() for text in _TEXTS), b"\xc3", b"\xa9")
TOKENS += (b"",) * (VOCAB - len(TOKENS))
END = VOCAB - 1
VOCABULARY = TokenVocabulary(TOKENS)


def text_of(tokens: Sequence[int]) -> str:
    """Raises UnicodeDecodeError where it ends within a character."""
    return b"".join(TOKENS[token] for token in tokens if token != END).decode()


def sampled(**fields) -> SamplingParams:
    """As varied as tokens of a tiny model can be."""
    return SamplingParams(
        **{"max_tokens": 120, "temperature": 5.0, "stop_token_ids": (END,), "seed": 1, **fields}
    )


def structured(**fields) -> SamplingParams:
    """With the fields of ``StructuredOutputsParams``, and no white space without an end."""
    if fields.keys() & {"json", "json_object"}:
        fields = {"disable_any_whitespace": True, **fields}
    return sampled(structured_outputs=StructuredOutputsParams(**fields))


# Of what is thought before a text: tokens, and a pair of them.
REASONING_ENDS = (*((token,) for token in range(40, 52)), (3, 4))


def behind_reasoning(tokens: Sequence[int]) -> Sequence[int] | None:
    """The tokens of the text; None: it has not begun."""
    for end in range(1, len(tokens) + 1):
        if any(tuple(tokens[end - len(mark) : end]) == mark for mark in REASONING_ENDS):
            return tokens[end:]
    return None


def random_schema(seed: int, depth: int = 2) -> dict:
    """A JSON schema of a value of a few dozen characters."""
    draw = random.Random(seed)
    kinds = ["integer", "boolean", "enum", "string"] + ["object", "array"] * 2 * (depth > 0)
    match draw.choice(kinds if depth < 2 else ["object", "array"]):
        case "object":
            names = draw.sample("abcdef", draw.randint(1, 3))
            parts = {name: random_schema(draw.random(), depth - 1) for name in names}
            required = [name for name in names if draw.random() < 0.7]
            return {"type": "object", "properties": parts, "required": required} | {
                "additionalProperties": False
            }
        case "array":
            items = random_schema(draw.random(), depth - 1)
            return {"type": "array", "items": items, "minItems": 1, "maxItems": 2}
        case "enum":
            return {"enum": draw.sample(["a", "ab", 12, None, True, 'x"y'], 3)}
        case "integer":
            return {"type": "integer", "minimum": -20, "maximum": 300}
        case "string":
            return {"type": "string", "maxLength": 4}
    return {"type": "boolean"}


def conforms(value: object, schema: dict) -> bool:
    """Whether a value is one of a :func:`random_schema`."""
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    match schema["type"], value:
        case "object", dict():
            parts = schema["properties"]
            known = parts.keys() >= value.keys() >= set(schema["required"])
            return known and all(conforms(one, parts[name]) for name, one in value.items())
        case "array", list():
            return 1 <= len(value) <= 2 and all(conforms(one, schema["items"]) for one in value)
        case "string", str():
            return len(value) <= 4
        case "integer", int():
            return not isinstance(value, bool) and -20 <= value <= 300
    return schema["type"] == "boolean" and isinstance(value, bool)


CHOICES = ("ab", "abc", 'x"\\y\nz', "☃é")
_REGEX = r"[a-f]{3}-[0-9]{1,4}(true|☃)?"
# Constraint, and whether a text is one of it.
KINDS: dict[str, tuple[dict, Callable[[str], object]]] = {
    "regex": ({"regex": _REGEX}, lambda text: re.fullmatch(_REGEX, text)),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "lark": ({"grammar": 'start: "a" start "b" | "12"'}, re.compile("(a*)12(b*)").fullmatch),
    "gbnf": ({"grammar": 'root ::= "a" [0-9]{3,5}'}, re.compile("a[0-9]{3,5}").fullmatch),
}
for _seed in range(8):
    _schema = random_schema(_seed)
    KINDS[f"schema-{_seed}"] = (
        {"json": _schema},
        lambda text, schema=_schema: conforms(json.loads(text), schema),
    )


def check_texts(
    results: Sequence[Result], names: Sequence[str], reasoned: Sequence[str] = ()
) -> int:
    """All texts that have ended by themselves are right; returns how many did.

    Those of ``reasoned`` come behind what is thought, which may end, too.
    """
    stopped = 0
    for name, result in zip(names, results, strict=True):
        assert not result.error, (name, result)
        text = behind_reasoning(result.tokens) if name in reasoned else result.tokens
        if text is None:
            assert result.tokens.index(END) == len(result.tokens) - 1
        elif result.finish == "stop":
            stopped += 1
            text = text_of(text)
            assert KINDS[name][1](text), (name, text)
        else:
            assert len(result.tokens) == 120, (name, result)
    return stopped


class StructuredTokenizer(ByteTokenizer):
    """Of ``TOKENS``; a text's tokens are single characters."""

    vocab_size = VOCAB
    end_tokens = (END,)

    def encode(self, text, *, begin=None):
        return [TOKENS.index(character.encode()) for character in text]

    def stream(self, prompt, *, skip_special_tokens=True):
        bytes_of = super().stream(prompt)

        def push(tokens: Sequence[int]) -> str:
            return bytes_of.push(b"".join(TOKENS[token] for token in tokens))

        return SimpleNamespace(push=push, finish=bytes_of.finish)

    def token_text(self, token):
        return TOKENS[token].decode(errors="replace")

    def token_bytes(self, token):
        return TOKENS[token]

    def chat(self, messages, **options):
        return self.encode("".join(message["content"] for message in messages))
