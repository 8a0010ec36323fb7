"""Requests for tokens: ``/tokenize`` and ``/detokenize``, which do not wait for the model."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from absorbed_mla.serving.llm import LLM
from absorbed_mla.serving.prompts import required
from absorbed_mla.serving.server.chat_request import Conversation, Message
from absorbed_mla.serving.server.protocol import KnownFields, List, text_of

Json = dict[str, Any]


class TokenizeRequest(Conversation):
    """Body of ``/tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: List[Message] | None = Field(default=None, min_length=1)  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    def answer(self, llm: LLM) -> Json:
        """Its tokens.

        Raises:
            ValueError: If they cannot be found.
        """
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("one of prompt and messages must be given")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens must be false or null with messages, got true")
        tokenizer = required(llm.tokenizer)
        if self.prompt is None:
            tokens = self.token_ids(llm)
        else:
            begin = False if self.add_special_tokens is False else None
            tokens = tokenizer.encode(self.prompt, begin=begin)
        found = {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens}
        texts = list(map(tokenizer.token_text, tokens)) if self.return_token_strs else None
        return {**found, "token_strs": texts}


class DetokenizeRequest(KnownFields):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: List[int]

    def answer(self, llm: LLM) -> Json:
        """Its text.

        Raises:
            ValueError: If a token is not the tokenizer's.
        """
        tokenizer = required(llm.tokenizer)
        for token in self.tokens:
            if not 0 <= token < tokenizer.vocab_size:
                raise ValueError(f"tokens must be below {tokenizer.vocab_size}, got {token}")
        return {"prompt": text_of(self.tokens, tokenizer)}
