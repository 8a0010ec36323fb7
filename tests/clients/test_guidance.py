"""guidance: a JSON schema through its model of OpenAI's interface."""

import pytest

from tests.clients.common import Answer

guidance = pytest.importorskip("guidance")


def test_json(url):
    from guidance.models import OpenAI

    model = OpenAI("tiny", base_url=url, api_key="sk-any", echo=False)
    with guidance.user():
        model += "Where is it warm?"
    with guidance.assistant():
        model += guidance.json(name="found", schema=Answer)
    Answer.model_validate_json(model["found"])
