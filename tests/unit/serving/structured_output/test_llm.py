"""Structured outputs of ``LLM``, ``AsyncLLM`` and the server's clients, around a model of junk."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import pytest

from absorbed_mla import LLM, AsyncLLM
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


@pytest.fixture(scope="module")
def llm():
    options = {"max_model_len": 256, "max_num_seqs": 8, "cache_tokens": 2048}
    made = LLM.from_model(
        generating_model(num_layers=1), tokenizer=StructuredTokenizer(), **options
    )
    with made:
        made.wake()
        yield made


@pytest.fixture(scope="module")
def client(llm):
    with serving(llm=llm) as served:
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
