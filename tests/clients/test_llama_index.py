"""llama-index: OpenAILike, complete, chat and streams."""

import pytest

like = pytest.importorskip("llama_index.llms.openai_like")


@pytest.mark.parametrize("is_chat", [False, True])
def test_streams_join(url, is_chat):
    llm = like.OpenAILike(
        model="tiny", api_base=url, api_key="sk-any", is_chat_model=is_chat, max_tokens=8
    )
    whole = llm.complete("Where is it warm?").text
    assert whole and [piece.text for piece in llm.stream_complete("Where is it warm?")][-1]
