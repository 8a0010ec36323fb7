"""Fields of requests: null and values that ask for nothing are taken, others refused by name."""

import json
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from absorbed_mla.registry import TOOL_PARSERS
from absorbed_mla.serving.server.chat_request import ChatRequest, Tool
from absorbed_mla.serving.server.output_parsers import OutputParsers
from absorbed_mla.serving.server.protocol import CompletionRequest
from absorbed_mla.serving.server.reasoning import REASONING_PARSERS
from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer

BODIES = {
    CompletionRequest: {"prompt": "a", "max_tokens": 4},
    ChatRequest: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
}
BOTH, COMPLETION, CHAT = tuple(BODIES), (CompletionRequest,), (ChatRequest,)
NO_OPS = [
    # Request, field, values besides null that ask for nothing, one that asks for something.
    (BOTH, "best_of", [1], 2),
    (BOTH, "early_stopping", [False], True),
    (BOTH, "kv_transfer_params", [{}], {"a": 1}),
    (BOTH, "length_penalty", [1], 0.5),
    (BOTH, "spaces_between_special_tokens", [True], False),
    (BOTH, "store", [False], True),
    (BOTH, "guided_decoding_backend", [], "outlines"),
    (BOTH, "use_beam_search", [False], True),
    (COMPLETION, "suffix", [""], "x"),
    (CHAT, "audio", [], {"voice": "x"}),
    (CHAT, "chat_template", [], "{{ 7 * 7 }}"),
    (CHAT, "documents", [[]], [{"text": "x"}]),
    (CHAT, "echo", [False], True),
    (CHAT, "function_call", ["none", "auto"], {"name": "x"}),
    (CHAT, "functions", [[]], [{"name": "x"}]),
    (CHAT, "modalities", [["text"]], ["text", "audio"]),
    (CHAT, "reasoning_effort", [], "high"),
    (CHAT, "verbosity", ["medium"], "high"),
]
IGNORED = {
    "metadata": {"run": "1"},
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "safety_identifier": "a",
    "service_tier": "auto",
    "user": "a",
}


def read(kind, **fields):
    return kind.model_validate_json(json.dumps({**BODIES[kind], **fields}))


@pytest.mark.parametrize(("kinds", "name", "accepted", "other"), NO_OPS)
def test_values_that_ask_for_nothing(kinds, name, accepted, other):
    for kind in kinds:
        plain = read(kind).params()
        for value in (None, *accepted):
            assert read(kind, **{name: value}).params() == plain
        with pytest.raises(ValidationError) as found:
            read(kind, **{name: other})
        [problem] = found.value.errors()
        words = " or ".join([*map(json.dumps, accepted), "null"])
        assert problem["loc"] == (name,)
        assert problem["msg"] == f"Value error, must be {words}, got {json.dumps(other)}"


@pytest.mark.parametrize("kind", BOTH)
def test_every_field_may_be_null(kind):
    """But what is asked; in completions, no ``max_tokens`` is no limit."""
    nulls = dict.fromkeys(kind.model_fields.keys() - BODIES[kind].keys())
    assert read(kind, **nulls).params() == read(kind).params()
    assert read(CompletionRequest, max_tokens=None).params().max_tokens is None
    assert read(kind, stream_options={"include_usage": None}).stream_options.include_usage is False


@pytest.mark.parametrize("kind", BOTH)
def test_ignored(kind):
    assert read(kind, **IGNORED).params() == read(kind).params()


@pytest.mark.parametrize("kind", BOTH)
def test_unknown_fields_are_refused(kind):
    """Also null: a client that misspells a field hears of it."""
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        read(kind, temprature=None)


@pytest.mark.parametrize("kind", BOTH)
def test_biases(kind):
    """Token ids are names in JSON."""
    fields = {"allowed_token_ids": [3, 5], "bad_words": ["a", [1, 2]]}
    params = read(kind, logit_bias={"7": -100, "8": 0.5}, **fields).params()
    assert params.logit_bias == {7: -100, 8: 0.5}
    assert (params.allowed_token_ids, params.bad_words) == ([3, 5], ("a", [1, 2]))
    assert not read(kind, logit_bias={}).params().changes_logits


def recorded(method: str):
    """An ``LLM`` that notes the options that its tokenizer, or the template, gets."""
    options = {}
    tokenizer = SimpleNamespace(**{method: lambda given, **found: options.update(found) or [1]})
    encode_chat = lambda given, found: tokenizer.chat(given, **found)  # noqa: E731
    encoder = {"encode_chat": encode_chat, "require_few_characters": lambda text: None}
    return SimpleNamespace(tokenizer=tokenizer, prompt_encoder=SimpleNamespace(**encoder)), options


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (
            {"add_generation_prompt": False, "continue_final_message": True},
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
        ({"chat_template_kwargs": {"thinking": True}}, {"thinking": True}),
    ],
)
def test_what_the_template_gets(fields, expected):
    llm, options = recorded("chat")
    assert read(ChatRequest, **fields).prompts()[0](llm) == [1] and options == expected


def test_special_tokens_in_front_of_a_prompt():
    """The tokenizer adds them by itself, unless it is not to."""
    llm, options = recorded("encode")
    [make] = read(CompletionRequest, add_special_tokens=False).prompts()
    assert make(llm) == [1] and options == {"begin": False}
    [make] = read(CompletionRequest).prompts()
    assert make(llm) == "a"


def test_log_probs_of_a_chat_that_are_not_asked_for():
    assert read(ChatRequest, logprobs=None, top_logprobs=0).params().logprobs is None


def test_long_values_are_cut():
    with pytest.raises(ValidationError) as found:
        read(ChatRequest, functions=[{"name": "x" * 1000}])
    assert len(found.value.errors()[0]["msg"]) < 150


def test_tools_that_are_not_to_be_called():
    """They need no parser, and the template sees them."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = read(ChatRequest, tools=tools, tool_choice="none")
    body.use(OutputParsers())
    llm, options = recorded("chat")
    body.prompts()[0](llm)
    assert options == {"tools": tools} and body.params().skip_special_tokens
    assert (
        body.message_parser([], ByteTokenizer()).is_plain and read(ChatRequest, tools=[]).params()
    )


def test_tools_are_read_once(monkeypatch):
    """Not for each of 1,024 outputs, which would keep other clients waiting for a minute."""
    dumped = []
    monkeypatch.setattr(Tool, "model_dump", lambda self, **_: dumped.append(self) or {"a": 1})
    tool = {"type": "function", "function": {"name": "f"}}
    body = read(ChatRequest, tools=[tool])
    body.use(OutputParsers(TOOL_PARSERS["glm45"]))
    for _ in range(3):
        assert not body.message_parser([], ByteTokenizer()).is_plain
    assert len(dumped) == 1


def test_forced_calls_exclude_other_formats():
    tools = [{"type": "function", "function": {"name": "f"}}]
    formats = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    for name, value in formats.items():
        body = read(ChatRequest, tools=tools, tool_choice="required", **{name: value})
        with pytest.raises(ValueError, match="must not be given together"):
            body.params()
    text = {"response_format": {"type": "text"}}
    assert read(ChatRequest, tools=tools, tool_choice="required", **text).params()


def test_reasoning_before_structured_output():
    """Only where there is a parser."""
    for format, ends in (("deepseek_r1", [[*b"</think>"]]), ("deepseek_v3", []), (None, None)):
        body = read(ChatRequest, structured_outputs={"regex": "a"})
        body.use(OutputParsers(reasoning=REASONING_PARSERS[format] if format else None))
        find = body.params().find_reasoning_ends
        assert (find and find([65], ByteTokenizer())) == ends
