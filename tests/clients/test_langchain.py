"""langchain-openai: invoke, stream, structured output, tools."""

import pytest

from tests.clients.common import PARAMETERS, TOOLS, TOWNS, Answer

langchain = pytest.importorskip("langchain_openai")


@pytest.fixture(scope="module")
def chat(url):
    return langchain.ChatOpenAI(model="tiny", base_url=url, max_tokens=200)


def test_streams_join(chat):
    greedy = chat.bind(temperature=0, max_tokens=20)
    whole = greedy.invoke("Where is it warm?").content
    assert "".join(piece.content for piece in greedy.stream("Where is it warm?")) == whole


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured(chat, method):
    found = chat.with_structured_output(Answer, method=method).invoke("Where?")
    assert isinstance(found, Answer)


def test_tools(chat):
    bound = chat.bind_tools(TOOLS, tool_choice="weather")
    [call] = bound.invoke("Where?").tool_calls
    assert call["name"] == "weather" and call["args"]["town"] in TOWNS
    assert PARAMETERS["required"] == list(call["args"])
