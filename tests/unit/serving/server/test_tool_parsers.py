"""Tool calls and reasoning in texts as models write them, whole and in pieces of every kind."""

import json
import random
import time

import pytest

from absorbed_mla.registry import TOOL_PARSERS
from absorbed_mla.serving.server import output_parsers
from absorbed_mla.serving.server.forced_calls import (
    ListedCalls,
    NamedCall,
    schema_of_one,
    schema_of_several,
)
from absorbed_mla.serving.server.logs import log_config
from absorbed_mla.serving.server.message_parts import MessageParser
from absorbed_mla.serving.server.output_parsers import OutputParsers
from absorbed_mla.serving.server.reasoning import REASONING_PARSERS
from absorbed_mla.serving.server.tool_calls import converted
from absorbed_mla.serving.structured_output.grammar import grammar_of, matcher_of
from absorbed_mla.serving.structured_output.parameters import StructuredOutputsParams
from absorbed_mla.serving.structured_output.vocabulary import TokenVocabulary
from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from tests.support.tokenizers import byte_level

CITY = {"city": {"type": "string"}, "days": {"type": "integer"}}
NOTE = {"text": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "tags": {"type": "array"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
    for name, properties in (("weather", CITY), ("note", NOTE), ("now", {}))
]
OSLO, NOTED = {"city": "Oslo", "days": 3}, {"text": 'a "b}"\n</c> \\ é', "tags": ["x", {"y": None}]}


def dsml(name, *parameters):
    lines = [
        f'<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n'
        for key, string, value in parameters
    ]
    return f'<｜DSML｜invoke name="{name}">\n{"".join(lines)}</｜DSML｜invoke>\n'


def dumped(value):
    return json.dumps(value, ensure_ascii=False)


TAGS = dumped(NOTED["tags"])
# Format -> two calls, one without arguments, as the model writes them.
TEXTS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(given)}\n"
        "```<｜tool▁call▁end｜>"
        for name, given in (("weather", OSLO), ("note", NOTED), ("now", {}))
    )
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{given}<｜tool▁call▁end｜>"
        for name, given in (("weather", dumped(OSLO)), ("note", dumped(NOTED)), ("now", ""))
    )
    + "<｜tool▁calls▁end｜>",
    "deepseek_v32": "<｜DSML｜function_calls>\n"
    + dsml("weather", ("city", "true", "Oslo"), ("days", "false", "3"))
    + dsml("note", ("text", "true", NOTED["text"]), ("tags", "false", TAGS))
    + dsml("now")
    + "</｜DSML｜function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{dumped(given)} "
        "<|tool_call_end|>"
        for i, (name, given) in enumerate((("weather", OSLO), ("note", NOTED), ("now", {})))
    )
    + "<|tool_calls_section_end|>",
    # The last two as GLM-4.7 writes them.
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
    f"<tool_call>note<arg_key>text</arg_key><arg_value>{NOTED['text']}</arg_value>"
    f"<arg_key>tags</arg_key><arg_value>{TAGS}</arg_value></tool_call><tool_call>now</tool_call>",
}
CALLS = [("weather", OSLO), ("note", NOTED), ("now", {})]


def read(pieces, parser):
    """The message, and the pieces that it came in, none of whose parts is empty."""
    found = [parser.read("".join(pieces[: i + 1]), False) for i in range(len(pieces))]
    found.append(parser.read("".join(pieces), True))
    assert all(one.id or one.arguments for piece in found for one in piece.calls.values())
    return parser.message, found


def calls_of(message):
    return [(one.name, json.loads(one.arguments)) for _, one in sorted(message.calls.items())]


def shown(message):
    """A message without the ids that are made."""
    calls = {i: (one.name, one.arguments) for i, one in message.calls.items()}
    return message.content, message.reasoning, calls


def splits(text):
    """Each in two pieces, one character each, and some at random."""
    yield from ([text[:i], text[i:]] for i in range(len(text) + 1))
    yield list(text)
    draw = random.Random(0)
    for _ in range(50):
        cuts = [0, *sorted(draw.choices(range(len(text) + 1), k=8)), len(text)]
        yield [text[a:b] for a, b in zip(cuts, cuts[1:])]


def of_format(name, **options):
    return MessageParser(None, TOOL_PARSERS[name].parser(TOOLS), **options)


@pytest.mark.parametrize("name", TOOL_PARSERS.names())
class TestToolCalls:
    def test_whole(self, name):
        message, _ = read([f"I look.\n\n{TEXTS[name]}"], of_format(name))
        assert message.content == "I look." and calls_of(message) == CALLS
        assert all(one.arguments[0] == "{" for one in message.calls.values())
        ids = [one.id for one in message.calls.values()]
        assert len(set(ids)) == 3
        if name == "kimi_k2":
            assert ids == ["functions.weather:0", "functions.note:1", "functions.now:2"]

    @pytest.mark.parametrize("before", ["", "\n", "I <look> <\n\n"])
    def test_every_split(self, name, before):
        """The name comes first; pieces of the arguments join; nothing depends on the pieces."""
        text = before + TEXTS[name]
        expected = shown(read([text], of_format(name))[0])
        for pieces in splits(text):
            message, found = read(pieces, of_format(name))
            assert shown(message) == expected
            begun = set()
            for piece in found:
                for i, call in piece.calls.items():
                    assert (call.name is None) == (i in begun)
                    begun.add(i)

    def test_no_calls(self, name):
        """Text is text, also with what looks like a call's begin, and spaces at the end."""
        begin = next(iter(TOOL_PARSERS[name].states["content"]))
        for text in ("Hello. \n", begin[:-1], f"a {begin}", f"a\n{begin}x ", " ", ""):
            for pieces in splits(text):
                message, _ = read(pieces, of_format(name))
                assert message.content == text and not message.calls

    def test_cut_off(self, name):
        """Arguments that have no end are what there is; what was said is never taken back."""
        text = TEXTS[name]
        expected = read([text], of_format(name))[0].calls
        for end in range(len(text)):
            message, _ = read([text[:end]], of_format(name))
            names = [one.name for one in message.calls.values()]
            assert names == [name for name, _ in CALLS[: len(names)]]
            for i, call in enumerate(message.calls.values()):
                assert expected[i].arguments.startswith(call.arguments)

    def test_texts_are_shown_before_their_end(self, name):
        begin, _, _ = TEXTS[name].partition("lo")
        message, _ = read([begin], of_format(name))
        assert message.calls[0].arguments.replace(" ", "") == '{"city":"Os'

    def test_one_call_alone(self, name):
        message, _ = read(list(TEXTS[name]), of_format(name, most_calls=1))
        assert calls_of(message) == CALLS[:1]

    def test_chosen_by_the_template(self, name, caplog, monkeypatch):
        monkeypatch.setattr(output_parsers._logger, "propagate", True)
        entry = TOOL_PARSERS[name]
        with caplog.at_level("INFO", output_parsers.__name__):
            template = "".join(entry.marks)
            assert OutputParsers.chosen("auto", None, template).tools is entry
        assert f"tool_call_parser: {name}, because the template has {entry.marks[0]}" in caplog.text
        assert OutputParsers.chosen(name, None, "").tools is entry


def test_no_parser(caplog, monkeypatch):
    monkeypatch.setattr(output_parsers._logger, "propagate", True)
    with caplog.at_level("INFO", output_parsers.__name__):
        parsers = OutputParsers.chosen("auto", None, "{{ messages }}")
    assert "tool_call_parser: none, because the chat template has no marks" in caplog.text
    with pytest.raises(ValueError, match="option tool_call_parser, one of deepseek_v3, "):
        parsers.require_tools()


def test_the_choice_is_in_the_servers_log():
    assert log_config("text")["loggers"][output_parsers.__name__]["level"] == "INFO"


def test_text_that_is_no_call():
    """A section without a call, and one with a call without a name."""
    for text in ("<|tool_calls_section_begin|> hm <|tool_calls_section_end|>", "<tool_call>\n"):
        for name in ("kimi_k2", "glm45"):
            for pieces in splits(f"a\n{text} b"):
                message, _ = read(pieces, of_format(name))
                assert message.content == f"a\n{text} b" and not message.calls


@pytest.mark.parametrize(
    ("header", "name"), [("functions.a.b:12", "a.b"), ("weather", "weather"), ("a:b", "a:b")]
)
def test_names_of_kimi(header, name):
    call, found = TOOL_PARSERS["kimi_k2"].id_and_name(header)
    assert found == name and (call == header) == header.startswith("functions.")


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3", {"type": ["string", "null"]}, "3"),
        ("null", {"type": ["string", "null"]}, None),
        ("3", {"anyOf": [{"type": "string"}, {"type": "number"}]}, 3),
        ("3", {"enum": ["3", "4"]}, "3"),
        ("True", {"type": "boolean"}, True),
        ("['a']", {}, ["a"]),
        ("Oslo", {}, "Oslo"),
        ("{1, 2}", {}, "{1, 2}"),
        ("[" * 10_000, {}, "[" * 10_000),
        ("NaN", {"type": "number"}, "NaN"),
        # Schemas are the client's, and nobody has checked them.
        *(
            ("3", {name: wrong}, 3)
            for name in ("type", "anyOf", "enum")
            for wrong in (5, None, [5])
        ),
    ],
)
def test_arguments_by_their_schemas(text, schema, value):
    assert converted(text, schema) == value


@pytest.mark.parametrize(
    ("string", "text", "value"),
    [
        ("false", '"Oslo"', "Oslo"),
        ("false", "3", 3),
        ("false", '["a", {"b": null}]', ["a", {"b": None}]),
        ("false", "Oslo", "Oslo"),
        ("false", "NaN", "NaN"),
        ("true", '"Oslo"', '"Oslo"'),
        ("true", "3", "3"),
    ],
)
def test_arguments_of_deepseek_say_whether_they_are_json(string, text, value):
    """As deepseek-ai/DeepSeek-V3.2 decodes them (encoding_dsv32.py), whatever the tool's schema."""
    call = dsml("weather", ("city", string, text))
    for pieces in splits(f"<｜DSML｜function_calls>{call}</｜DSML｜function_calls>"):
        assert calls_of(read(pieces, of_format("deepseek_v32"))[0]) == [
            ("weather", {"city": value})
        ]


THOUGHTS = [
    # Format, end of the prompt, chat_template_kwargs, text, reasoning and content.
    ("deepseek_r1", "", {}, "why</think>\n\nso", "why", "\n\nso"),
    ("deepseek_r1", "<think>\n", {}, "why</think>so", "why", "so"),
    ("deepseek_r1", "", {}, "<think>why</think>so", "why", "so"),
    ("deepseek_r1", "", {}, "why", "why", ""),
    ("deepseek_r1", "", {}, "<thi", "<thi", ""),
    ("deepseek_v3", "</think>", {}, "<think> no</think>", "", "<think> no</think>"),
    ("deepseek_v3", "<think>", {"thinking": True}, "why</think>so", "why", "so"),
    ("deepseek_v3", "", {}, "so</think>", "", "so</think>"),
    ("deepseek_v3", "", {"thinking": True}, "why</think>so", "why", "so"),
    ("glm45", "", {}, "\n<think>why</think>\nso", "why", "\nso"),
    ("glm45", "", {}, "so <think>", "", "so <think>"),
    ("glm45", "<think>\n", {}, "why</think>so", "why", "so"),
    ("glm45", "<think></think>\n", {}, "so", "", "so"),
    ("kimi_k2", "", {}, "why</think>so</think>", "why", "so</think>"),
    ("kimi_k2", "", {"thinking": False}, "so", "", "so"),
    ("kimi_k2", "", {}, "why<|tool_calls_section_begin|>", "why", "<|tool_calls_section_begin|>"),
]


@pytest.mark.parametrize(("name", "prompt", "kwargs", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning(name, prompt, kwargs, text, reasoning, content):
    for pieces in splits(text):
        for shows in (True, False):
            parser = REASONING_PARSERS[name].parser(prompt, kwargs)
            message, _ = read(pieces, MessageParser(parser, None, with_reasoning=shows))
            assert (message.reasoning, message.content) == (reasoning if shows else "", content)


_SECTION = "<|tool_calls_section_begin|>"
BEFORE_STRUCTURED = [
    # Format, end of the prompt, chat_template_kwargs, ends of reasoning, text, and its parts.
    ("deepseek_r1", "", {}, ["</think>"], "<think>why</think>{}", "why", "{}"),
    ("deepseek_v3", "", {}, [], "<think>", "", "<think>"),
    ("deepseek_v3", "", {"thinking": True}, ["</think>"], "why", "why", ""),
    ("glm45", "", {}, ["</think>"], "why</think>{}", "why", "{}"),
    ("glm45", "", {"enable_thinking": False}, [], "{}", "", "{}"),
    ("glm45", "<think></think>\n", {}, [], "{}", "", "{}"),
    ("kimi_k2", "", {}, ["</think>", _SECTION], f"why{_SECTION}[{{", "why", "[{"),
    ("kimi_k2", "<think>", {}, ["</think>", _SECTION], "why</think>{}", "why", "{}"),
]


@pytest.mark.parametrize(
    ("name", "prompt", "kwargs", "marks", "text", "reasoning", "content"), BEFORE_STRUCTURED
)
def test_reasoning_before_structured_output(name, prompt, kwargs, marks, text, reasoning, content):
    """The text begins where the grammar does."""
    for pieces in splits(text):
        parser = REASONING_PARSERS[name].parser(prompt, kwargs, structured=True)
        assert parser.ends(ByteTokenizer()) == [list(mark.encode()) for mark in marks]
        message, _ = read(pieces, MessageParser(parser, None))
        assert (message.reasoning, message.content) == (reasoning, content)


def test_a_mark_that_is_no_token():
    """Others may have parts of it, and of the text behind it."""
    parser = REASONING_PARSERS["deepseek_r1"].parser("", {}, structured=True)
    with pytest.raises(ValueError, match="need a tokenizer that has </think> as one token, got 8"):
        parser.ends(HuggingFaceTokenizer(byte_level()))


def test_reasoning_before_calls():
    text = f"I <need>.</think>\n{TEXTS['kimi_k2']}"
    for pieces in splits(text):
        thoughts = REASONING_PARSERS["kimi_k2"].parser("", {})
        message, _ = read(pieces, MessageParser(thoughts, TOOL_PARSERS["kimi_k2"].parser(TOOLS)))
        assert (message.reasoning, message.content) == ("I <need>.", "")
        assert calls_of(message) == CALLS


class TestForcedCalls:
    def test_listed(self):
        for spaces in ({}, {"indent": 1}):
            listed = [{"name": name, "parameters": given} for name, given in CALLS]
            text = json.dumps(listed, ensure_ascii=False, **spaces)
            for pieces in splits(text):
                message, _ = read(pieces, MessageParser(None, ListedCalls()))
                assert calls_of(message) == CALLS and not message.content

    def test_white_space_without_an_end(self):
        """As models write that do not find one: each token of it takes no longer."""
        calls, start = ListedCalls(), time.process_time()
        for text in ("[\n", '{"name":', ' "f",'):
            assert not any(calls.read(one) for one in (text, *[" " * 40] * 1000))
        assert time.process_time() - start < 5
        assert calls.read('"parameters":{"a": " b"}').calls[0].arguments == '{"a": " b"}'

    def test_listed_and_cut_off(self):
        text = '[{"name":"weather","parameters":{"city":"Os\\'
        message, _ = read(list(text), MessageParser(None, ListedCalls()))
        assert message.calls[0].arguments == '{"city":"Os\\'

    def test_named(self):
        for pieces in splits(dumped(NOTED)):
            message, _ = read(pieces, MessageParser(None, NamedCall("note")))
            assert calls_of(message) == [("note", NOTED)]

    def test_grammar(self):
        """Structured output lets calls of the tools pass, their names first, and no others."""
        pytest.importorskip("llguidance")
        params = StructuredOutputsParams(json=schema_of_several(TOOLS, 1))
        vocabulary = TokenVocabulary.of(ByteTokenizer(), 257).for_grammars()
        good, bad = {"name": "weather", "parameters": OSLO}, {"name": "no", "parameters": {}}
        turned = dict(reversed(good.items()))
        for calls, passes in (
            ([good], True),
            ([bad], False),
            ([good] * 2, False),
            ([turned], False),
        ):
            text = dumped(calls).encode()
            matcher = matcher_of(grammar_of(params), vocabulary)
            assert (matcher.try_consume_tokens(list(text)) == len(text)) is passes, calls

    def test_schemas(self):
        definitions = {
            "$defs": {"A": {"type": "string"}},
            "properties": {"a": {"$ref": "#/$defs/A"}},
        }
        tools = [
            *TOOLS[2:],
            {"type": "function", "function": {"name": "a", "parameters": definitions}},
        ]
        assert schema_of_one({"function": {"name": "f"}}) == {"type": "object", "properties": {}}
        found = schema_of_several(tools, 1)
        assert found["$defs"] == definitions["$defs"] and found["maxItems"] == 1
        assert "maxItems" not in schema_of_several(tools, None)
        names = [one["properties"]["name"]["enum"] for one in found["items"]["anyOf"]]
        assert names == [["now"], ["a"]]
        other = {"$defs": {"A": {"type": "integer"}}}
        tools.append({"type": "function", "function": {"name": "b", "parameters": other}})
        with pytest.raises(ValueError, match=r"tools must not have several \$defs of A"):
            schema_of_several(tools, None)
