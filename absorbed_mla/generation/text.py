"""Text of generated tokens, piece by piece while they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Bytes, and so tokens, of the longest UTF-8 character: an older token cannot be part of one that
# is still incomplete.
_LONGEST_CHARACTER = 4
# Tokens that new ones are decoded after, at least: some tokenizers drop a space at the beginning of
# a text.
_CONTEXT = 8
# At most: with every token that is dropped, the text of the others has to be decoded anew.
_MOST_CONTEXT = 16


class TextStream(Protocol):
    """Turns the tokens of one request into text."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; an incomplete character is held back."""
        ...

    def finish(self) -> str:
        """The rest of the text, with a replacement character for each incomplete one."""
        ...


class ByteStream:
    """Text of tokens below 256, which are bytes.

    Args:
        eod: The token that ends a document, which has no text. Other tokens above 255 become a
            replacement character.
    """

    def __init__(self, eod: int) -> None:
        self._eod = eod
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        """See :class:`TextStream`."""
        return "".join(self._text(token) for token in tokens)

    def finish(self) -> str:
        """See :class:`TextStream`."""
        return self._decoder.decode(b"", final=True)

    def _text(self, token: int) -> str:
        if token < 256:
            return self._decoder.decode(bytes([token]))
        return self.finish() + ("" if token == self._eod else _REPLACEMENT)


class HuggingFaceStream:
    """Text of the tokens of a Hugging Face tokenizer.

    A token alone may be half a character, or lose its leading space. So new tokens are decoded
    together with some before them, and held back until the text that they add is complete.

    Args:
        tokenizer: Of ``transformers``.
        prompt: Token ids before the first one.
        skip_special_tokens: Whether the tokenizer's special tokens have no text.
    """

    def __init__(
        self, tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._shown = list(prompt[-_CONTEXT:])
        self._text_of_shown = self._decode(self._shown)
        self._waiting: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """See :class:`TextStream`."""
        return "".join(self._next(token) for token in tokens)

    def finish(self) -> str:
        """See :class:`TextStream`."""
        return self._show(len(self._waiting))

    def _next(self, token: int) -> str:
        self._waiting.append(token)
        text = self._decode([*self._shown, *self._waiting])
        if not text[len(self._text_of_shown) :].endswith(_REPLACEMENT):
            return self._show(len(self._waiting), text)
        # Every token is at least one byte.
        return self._show(max(0, len(self._waiting) - (_LONGEST_CHARACTER - 1)))

    def _show(self, count: int, text: str | None = None) -> str:
        """What ``count`` waiting tokens add; ``text``: of them and those shown, if it is known."""
        if not count:
            return ""
        shown = [*self._shown, *self._waiting[:count]]
        text = self._decode(shown) if text is None else text
        added = text[len(self._text_of_shown) :]
        self._waiting = self._waiting[count:]
        if len(shown) > _MOST_CONTEXT:
            shown = shown[-_CONTEXT:]
            text = self._decode(shown)
        self._shown, self._text_of_shown = shown, text
        return added

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            tokens,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
