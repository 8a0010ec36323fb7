"""The texts of a tokenizer's tokens, as grammars read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer


@dataclass(frozen=True)
class TokenVocabulary:
    """What each token adds to a text.

    Attributes:
        tokens: UTF-8 of each token, also a part of a character; none of those that are no text,
            such as special ones.
    """

    tokens: tuple[bytes, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> TokenVocabulary:
        """Of a tokenizer; takes a second.

        Args:
            size: Of the model's vocabulary, which may have fewer tokens, or more.
        """
        # A tokenizer of the caller's may be without.
        find: Callable[[int], bytes] = getattr(
            tokenizer, "token_bytes", lambda token: tokenizer.token_text(token).encode()
        )
        without = {*tokenizer.end_tokens, *getattr(tokenizer, "special_tokens", ())}
        known = range(min(size, tokenizer.vocab_size))
        texts = [b"" if token in without else find(token) for token in known]
        return cls((*texts, *[b""] * (size - len(texts))))

    def for_grammars(self) -> Any:
        """Tokenizer of llguidance, with one token more: the end of a text, wherever one may end."""
        from llguidance import LLTokenizer

        return LLTokenizer(_Wrapper(self.tokens))


class _Wrapper:
    """A tokenizer as llguidance takes it."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokens: tuple[bytes, ...]) -> None:
        self.tokens, self.eos_token_id = [*tokens, b""], len(tokens)

    def __call__(self, text: str | bytes) -> list[int]:
        """Not needed: no grammar forces tokens (``grammar.py``)."""
        return []
