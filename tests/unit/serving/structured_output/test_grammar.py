"""What is checked before a request runs: parameters, grammars and what they may take."""

import importlib.util
import re
import time

import pytest

from absorbed_mla import SamplingParams, StructuredOutputsParams
from absorbed_mla.serving.structured_output.grammar import (
    MOST_CHARACTERS,
    GrammarChecks,
    grammar_of,
    matcher_of,
)
from absorbed_mla.serving.structured_output.vocabulary import TokenVocabulary
from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from tests.support.tokenizers import byte_level, with_byte_fallback

pytest.importorskip("llguidance")

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NESTED: dict = {}
for _ in range(3000):
    NESTED = {"not": NESTED}
_CHAIN = "\n".join(["start: r0", *(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(2000))])
_CHAIN += '\nr2000: "b"'


@pytest.fixture(scope="module")
def checks():
    return GrammarChecks(ByteTokenizer(), 260)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "one of json, regex, choice, grammar, json_object, got none"),
        ({"regex": "a", "json": "{}"}, "got json, regex"),
        ({"json_object": False}, "got none"),
        ({"choice": "ab"}, "choice must be texts"),
        ({"choice": []}, "choice must be texts"),
        ({"choice": ["a", 1]}, "choice must be texts"),
        ({"json": True}, "json must be an object"),
        ({"regex": 1}, "regex must be a text"),
        ({"structural_tag": "{}"}, "structural_tag is not available"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern needs json"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "disable_any_whitespace needs json"),
    ],
)
def test_parameters(fields, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        StructuredOutputsParams(**fields)
    with pytest.raises(ValueError, match="structured_outputs must be StructuredOutputsParams"):
        SamplingParams(structured_outputs=fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"json": "{"}, "json is no JSON schema"),
        ({"json": "[1]"}, "json must be an object"),
        ({"json": {"type": "thing"}}, "Invalid type"),
        ({"json": {"a": {1}}}, "json is no JSON schema"),
        # Python's parser refuses it, or from 3.12 on the grammar's.
        ({"json": NESTED}, ""),
        ({"json": '{"not":' * 8000 + "{}" + "}" * 8000}, ""),
        ({"json": {"$ref": "#"}}, "structured_outputs"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "Unsatisfiable"),
        ({"json": {**OBJECT, "description": "x" * MOST_CHARACTERS}}, f"most {MOST_CHARACTERS} ch"),
        ({"json_object": True, "whitespace_pattern": "("}, "regex parse error"),
        ({"regex": "(a"}, "regex parse error"),
        ({"regex": "a" * MOST_CHARACTERS + "b"}, f"at most {MOST_CHARACTERS} characters"),
        ({"regex": "(" * 30000 + "a" + ")" * 30000}, "invalid regex"),
        # Takes too much before the first token.
        ({"grammar": _CHAIN}, "structured_outputs"),
        ({"regex": r"[^\s\S]"}, "structured_outputs"),
        ({"choice": ["a" * MOST_CHARACTERS, "b"]}, f"at most {MOST_CHARACTERS} characters"),
        ({"choice": ["\ud800"]}, "structured_outputs"),
        ({"grammar": "start: other"}, 'unknown name: "other"'),
        ({"grammar": "root ::= " + "(" * 9000}, "GBNF"),
    ],
)
def test_refused(checks, fields, words):
    start = time.monotonic()
    with pytest.raises(ValueError, match=re.escape(words)):
        checks.check(StructuredOutputsParams(**fields))
    assert time.monotonic() - start < 20


def accepts(vocabulary: TokenVocabulary, text: bytes, **fields) -> bool:
    """Whether a text is of a grammar, by tokens of one byte each."""
    tokenizer = vocabulary.for_grammars()
    matcher = matcher_of(grammar_of(StructuredOutputsParams(**fields)), tokenizer)
    tokens = [vocabulary.tokens.index(bytes([byte])) for byte in text]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ('{"a": 1}', {"json": OBJECT}, True),
        ('{"a":1, "b":2}', {"json": OBJECT}, True),
        ('{"a":1,"b":2}', {"json": OBJECT, "disable_additional_properties": True}, False),
        ('{"a": 1}', {"json": OBJECT, "disable_any_whitespace": True}, False),
        ('{"a":\t1}', {"json": OBJECT, "whitespace_pattern": "[ ]*"}, False),
        ('{"a": 1}', {"json": OBJECT, "whitespace_pattern": "[ ]*"}, True),
        ('{"a":1}', {"json": '{"type": "object"}'}, True),
        ("[1]", {"json_object": True}, False),
        ('a"\\\n/é', {"choice": ['a"\\\n/é', "b"]}, True),
        ("a/\n", {"regex": "a/\n"}, True),
        ("aab", {"grammar": 'root ::= "a"+ "b"'}, True),
    ],
)
def test_texts(text, fields, expected):
    vocabulary = TokenVocabulary.of(ByteTokenizer(), 257)
    assert accepts(vocabulary, text.encode(), **fields) is expected


def test_every_way_through_a_text_is_allowed():
    """Where one text only is left, the model chooses among its tokens."""
    vocabulary = TokenVocabulary((b"a", b"ab", b"abc", b"b", b"c", b"d"))
    matcher = matcher_of(
        grammar_of(StructuredOutputsParams(regex="abcd")), vocabulary.for_grammars()
    )
    assert matcher.compute_bitmask()[0] == 0b000111


@pytest.mark.parametrize("make", [byte_level, with_byte_fallback])
def test_vocabulary(make):
    """Special tokens and numbers without a token are no text."""
    tokenizer = HuggingFaceTokenizer(make())
    vocabulary = TokenVocabulary.of(tokenizer, tokenizer.vocab_size + 3)
    assert vocabulary.tokens[-3:] == (b"",) * 3
    for token in {*tokenizer.special_tokens, *tokenizer.end_tokens}:
        assert not vocabulary.tokens[token]
    assert set(map(bytes, ([byte] for byte in range(256)))) <= set(vocabulary.tokens)
    assert accepts(vocabulary, '{"a": "é"}'.encode(), json_object=True)


def test_without(checks, monkeypatch):
    choice = StructuredOutputsParams(choice=["a"])
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        GrammarChecks(None, 260).check(choice)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("pip install 'absorbed-mla[structured]'")):
        checks.check(choice)
