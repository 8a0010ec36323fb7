"""outlines: a pydantic model as the type of an answer."""

import openai
import pytest

from tests.clients.common import Answer

outlines = pytest.importorskip("outlines")


def test_type(url):
    model = outlines.from_openai(openai.OpenAI(base_url=url), "tiny")
    Answer.model_validate_json(model("Where is it warm?", Answer))
