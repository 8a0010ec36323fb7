"""openai: sync, async, streams, parsed answers, tools, responses."""

import asyncio

import pytest
from pydantic import BaseModel

from tests.clients.common import ASK, TOOLS, Answer, are_arguments

openai = pytest.importorskip("openai")


class Call(BaseModel):
    """Arguments of the tool."""

    town: str


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, max_retries=0) as made:
        yield made


def test_streams_join(client):
    ask = {"model": "tiny", "messages": ASK, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    pieces = client.chat.completions.create(**ask, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole


def test_async(url):
    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=url) as client:
            asked = (
                client.completions.create(model="tiny", prompt=text, max_tokens=4, seed=1)
                for text in ("ab", "abc", "ab")
            )
            return [one.choices[0].text for one in await asyncio.gather(*asked)]

    first, other, again = asyncio.run(all_of_them())
    assert first == again and len(other)


def test_parse(client):
    found = client.chat.completions.parse(model="tiny", messages=ASK, response_format=Answer)
    assert isinstance(found.choices[0].message.parsed, Answer)


def test_tools(client):
    ask = {"model": "tiny", "messages": ASK, "tools": TOOLS, "tool_choice": "required"}
    [call, *_] = client.chat.completions.create(**ask).choices[0].message.tool_calls
    assert call.function.name == "weather" and are_arguments(call.function.arguments)


def test_responses(client):
    found = client.responses.parse(model="tiny", input="Where?", text_format=Answer)
    assert isinstance(found.output_parsed, Answer)
