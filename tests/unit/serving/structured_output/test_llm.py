"""Structured outputs of ``LLM``, ``AsyncLLM`` and the server's clients, around a model of junk."""

import asyncio
import json
import re
from types import SimpleNamespace
from typing import ClassVar, Literal

import pytest

from absorbed_mla import LLM, AsyncLLM
from absorbed_mla.registry import TOOL_PARSERS
from absorbed_mla.serving.structured_output import grammar, request_grammar
from tests.support.engine import generating_model
from tests.support.llm import serving
from tests.support.structured import KINDS, StructuredTokenizer, sampled, structured

pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

NAMES = list(KINDS)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 12]}}, "required": ["a"]}
SCHEMA |= {"additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


class Answer(pydantic.BaseModel):
    """What a client wants."""

    model_config = pydantic.ConfigDict(extra="forbid")
    a: Literal["x", "ab"]
    b: list[bool]


class ThinkingTokenizer(StructuredTokenizer):
    """With marks of reasoning, which are no text, and letters of calls; templates may have both."""

    marks: ClassVar = {"<think>": 60, "</think>": 61}
    special_tokens = (60, 61)
    letters: ClassVar = {58: "m", 59: "p"}

    def encode(self, text, *, begin=None):
        found = []
        for part in re.split("(</?think>)", text):
            found += [self.marks[part]] if part in self.marks else super().encode(part)
        return found

    def stream(self, prompt, *, skip_special_tokens=True):
        plain, texts = super().stream(prompt), {60: "<think>", 61: "</think>", **self.letters}

        def push(tokens):
            each = (texts[token] if token in texts else plain.push([token]) for token in tokens)
            return "".join(each)

        return SimpleNamespace(push=push, finish=plain.finish)

    def token_bytes(self, token):
        return self.letters[token].encode() if token in self.letters else super().token_bytes(token)

    def chat(self, messages, *, ended=False, **options):
        return super().chat(messages) + (self.encode("<think></think>") if ended else [])


@pytest.fixture(scope="module")
def llm():
    options = {"max_model_len": 256, "max_num_seqs": 8, "cache_tokens": 2048}
    made = LLM.from_model(generating_model(num_layers=1), tokenizer=ThinkingTokenizer(), **options)
    with made:
        made.wake()
        yield made


@pytest.fixture(scope="module")
def client(llm):
    from absorbed_mla.serving.server.output_parsers import OutputParsers
    from absorbed_mla.serving.server.reasoning import REASONING_PARSERS

    parsers = OutputParsers(TOOL_PARSERS["glm45"], REASONING_PARSERS["deepseek_v3"])
    with serving(llm=llm, app_options={"parsers": parsers}) as served:
        yield openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0)


def check(name, output):
    if output.finish_reason == "stop":
        assert KINDS[name][1](output.text), (name, output.text)
    else:
        assert len(output.token_ids) == 120
    return output.finish_reason == "stop"


def generate(llm, params):
    return [output.outputs for output in llm.generate(["ab"] * len(params), params, False)]


def test_several_outputs(llm):
    params = [structured(**KINDS[name][0]).replace(n=2, stop_token_ids=()) for name in NAMES]
    found = generate(llm, params)
    stopped = [check(name, one) for name, outputs in zip(NAMES, found) for one in outputs]
    assert sum(stopped) >= len(stopped) - 4
    assert len({one.text for outputs in found for one in outputs}) > len(NAMES)


def test_a_grammar_is_read_once(llm, monkeypatch):
    """Not for each prompt and output of a request: between steps, others would wait for that."""
    found, made = [], grammar.grammar_of
    for module in (grammar, request_grammar):
        monkeypatch.setattr(module, "grammar_of", lambda one: found.append(one) or made(one))
    params = structured(choice=["ab", "x1"]).replace(n=3)
    assert len(llm.generate(["ab"] * 4, params, False)) == 4 and len(found) == 1


PENALTIES = {"repetition_penalty": 1.5, "frequency_penalty": 1.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {0: 50.0, 63: 100.0}, "bad_words": [[2]]},
        {**PENALTIES, "min_tokens": 3},
        {"logprobs": 2},
        {"ignore_eos": True},
        {"top_k": 3, "top_p": 0.9},
        {"temperature": 0.0, "max_tokens": 200},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_parameters(llm, changes):
    """Of a choice, which always ends: also before ``min_tokens``, or without a token that ends."""
    params = structured(choice=["ab", "abc", "x1", "12{"]).replace(stop_token_ids=(), **changes)
    [[output]] = generate(llm, [params.replace(allowed_token_ids=None)])
    assert output.text in ("ab", "abc", "x1", "12{") and output.finish_reason == "stop"
    if "logprobs" in changes:
        # The model's, of which the grammar takes nothing away.
        [[free]] = generate(llm, [sampled(max_tokens=1, logprobs=2)])
        assert set(output.logprobs[0]) >= set(list(free.logprobs[0])[1:])


def test_nothing_is_left_to_draw(llm):
    """By two parameters together: the request alone fails."""
    asked = structured(choice=["ab"]).replace(allowed_token_ids=[5])
    [[failed], [other]] = generate(llm, [asked, structured(choice=["x1"])])
    assert failed.finish_reason == "error" and "structured_outputs leaves none" in failed.error
    assert other.text == "x1"


def test_stop_tokens_end_whole_texts_only(llm):
    """Also a token of the text, which may be another one's as well."""
    asked = [structured(regex="[12]{4,9}").replace(stop_token_ids=(tok,), seed=tok) for tok in ONES]
    for [output] in generate(llm, asked):
        assert output.finish_reason == "stop" and 4 <= len(output.text) <= 9, output


ONES = (StructuredTokenizer().encode("1")[0], StructuredTokenizer().encode("2")[0], 63)


def test_streams_of_async_llm(llm):
    async def main():
        one = AsyncLLM.from_llm(llm)
        params = [structured(**KINDS[name][0]) for name in NAMES]
        try:
            return await asyncio.gather(*(last(one, param) for param in params))
        finally:
            one._service.stop()

    async def last(one, params):
        async for output in one.generate("ab", params):
            text = output.outputs[0].text
        assert output.outputs[0].text == text
        return output.outputs[0]

    for name, output in zip(NAMES, asyncio.run(main())):
        check(name, output)


def complete(client, **extra):
    answer = client.completions.create(
        model="tiny", prompt="ab", max_tokens=200, temperature=1.5, extra_body=extra
    )
    return answer.choices[0].text


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"structured_outputs": {"choice": ["ab", "x"]}}, ("ab", "x")),
        ({"guided_choice": ["ab", "x"]}, ("ab", "x")),
        ({"guided_regex": "[ab]2"}, ("a2", "b2")),
        ({"guided_grammar": 'start: "y" | "z"'}, ("y", "z")),
        ({"guided_json": {"enum": [1, "a"]}, "guided_whitespace_pattern": ""}, ("1", '"a"')),
    ],
)
def test_fields(client, extra, expected):
    assert complete(client, **extra) in expected


def test_response_format(client):
    assert json.loads(complete(client, response_format=FORMAT))["a"] in (1, 12)
    message = {"role": "user", "content": "ab"}
    answer = client.chat.completions.parse(
        model="tiny", messages=[message], response_format=Answer, temperature=1.2, seed=3
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)


TOOL = {"type": "function", "function": {"name": "ab", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "ab"}}
ASKED = {
    "format": {"response_format": FORMAT},
    "structured": {"structured_outputs": {"json": SCHEMA}},
    "required": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": [TOOL], "tool_choice": NAMED},
}


def think(client, seed, **extra):
    fields = {"max_tokens": 150, "temperature": 3.0, "seed": seed, "logit_bias": {61: 12}, **extra}
    message = {"role": "user", "content": "ab"}
    [choice] = client.chat.completions.create(
        model="tiny", messages=[message], extra_body=fields
    ).choices
    return choice


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize(
    ("thinks", "kwargs"),
    [(True, {"thinking": True}), (False, {"thinking": True, "ended": True}), (False, {})],
)
def test_behind_reasoning(client, asked, thinks, kwargs):
    """Whatever is thought, the text behind is valid; nothing is where the template ended it."""
    asked, ended, thoughts = {**asked, "chat_template_kwargs": kwargs}, 0, set()
    for seed in range(4):
        choice = think(client, seed, **asked)
        thoughts.add(getattr(choice.message, "reasoning", None))
        if choice.finish_reason == "length":
            continue
        ended += 1
        calls = choice.message.tool_calls
        text = calls[0].function.arguments if calls else choice.message.content
        assert json.loads(text)["a"] in (1, 12) and bool(calls) == ("tools" in asked)
    assert ended and (thoughts != {None}) == thinks


THINKS = {"chat_template_kwargs": {"thinking": True}}


def test_too_short_for_what_is_thought(client):
    fields = {"max_tokens": 5, "logit_bias": {61: -100, 63: -100}, **ASKED["format"], **THINKS}
    choice = think(client, 1, **fields)
    assert choice.finish_reason == "length" and not choice.message.content
    assert choice.message.reasoning


def test_responses_and_completions(client):
    """The latter are as the prompt has them: nobody finds reasoning there."""
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    bias = {"logit_bias": {61: 12}, "seed": 2}
    fields = {"temperature": 3, "text": {"format": form}, "extra_body": bias | THINKS}
    answer = client.responses.create(model="tiny", input="ab", **fields)
    assert [one.type for one in answer.output] == ["reasoning", "message"]
    assert json.loads(answer.output_text)["a"] in (1, 12)
    assert json.loads(complete(client, response_format=FORMAT, **bias))["a"] in (1, 12)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "must have json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "'text', 'json_object' or 'json_schema'"),
        ({"response_format": {**FORMAT, "type": "json_object"}}, "must have json_schema"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "must not be given together"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "got regex, choice"),
        ({"guided_json": {"type": "thing"}}, "Invalid type"),
        ({"structured_outputs": {"regex": "("}}, "regex parse error"),
        ({"structured_outputs": {"json": "x" * 70000}}, "at most 65536 characters"),
        ({"structured_outputs": {"choice": ["a"], "what": 1}}, "what"),
    ],
)
def test_refused(client, extra, words):
    with pytest.raises(openai.BadRequestError) as found:
        complete(client, **extra)
    assert words in found.value.message and len(found.value.message) < 1000
