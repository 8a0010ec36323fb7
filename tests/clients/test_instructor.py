"""instructor: a pydantic model, by JSON schema and by tools."""

import openai
import pytest

from tests.clients.common import ASK, Answer

instructor = pytest.importorskip("instructor")


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_model(url, mode):
    client = instructor.from_openai(
        openai.OpenAI(base_url=url), mode=getattr(instructor.Mode, mode)
    )
    found = client.chat.completions.create(
        model="tiny", messages=ASK, response_model=Answer, max_retries=0
    )
    assert isinstance(found, Answer)
