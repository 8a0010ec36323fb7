"""litellm: completion, streams, JSON schema."""

import pytest

from tests.clients.common import ASK, Answer

litellm = pytest.importorskip("litellm")


def ask(url, **fields):
    return litellm.completion(
        model="openai/tiny", api_base=url, api_key="sk-any", messages=ASK, max_tokens=60, **fields
    )


def test_streams_join(url):
    whole = ask(url, temperature=0).choices[0].message.content
    pieces = ask(url, temperature=0, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole


def test_schema(url):
    content = ask(url, response_format=Answer).choices[0].message.content
    Answer.model_validate_json(content)
