"""pydantic-ai: an agent whose output is a pydantic model, by a tool and by JSON schema."""

import pytest

from tests.clients.common import Answer

pydantic_ai = pytest.importorskip("pydantic_ai")


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
def test_agent(url, output):
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="sk-any"))
    agent = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, output)(Answer), retries=0)
    assert isinstance(agent.run_sync("Where is it warm?").output, Answer)
