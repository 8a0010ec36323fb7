"""Tokenizers that also give text back, token by token."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from training.tokenizers import ByteTokenizer, HuggingFaceTokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# UTF-8 has no longer character, so no earlier token can begin one that is still to be completed.
_LONGEST_CHARACTER = 4
# Tokens of the prompt that the first new ones are decoded behind: some tokenizers drop a space at
# the beginning of a text.
_BEHIND = 8


class TextStream(Protocol):
    """The text of one request."""

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these tokens complete; half a character waits for its other half."""
        ...

    def finish(self) -> str:
        """What is left: a replacement character for each half that waits in vain."""
        ...


class ByteStream:
    """Text of :class:`ByteTokenizer`'s tokens; those that are no bytes have none."""

    def __init__(self) -> None:
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
        return self.finish() + ("" if token == ByteTokenizer.eod else _REPLACEMENT)


class HuggingFaceStream:
    """Text of a Hugging Face tokenizer's tokens.

    Such tokenizers decode whole texts: a token alone may be half a character or lose its space. So
    new tokens are decoded behind the last ones, until what they add is complete.

    Args:
        tokenizer: Of ``transformers``.
        prompt: Tokens before the first one.
    """

    def __init__(self, tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = list(prompt[-_BEHIND:])
        self._waiting: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """See :class:`TextStream`."""
        return "".join(self._next(token) for token in tokens)

    def finish(self) -> str:
        """See :class:`TextStream`."""
        return self._show(len(self._waiting))

    def _next(self, token: int) -> str:
        self._waiting.append(token)
        if not self._added(self._waiting).endswith(_REPLACEMENT):
            return self.finish()
        # Any token has at least a byte.
        return self._show(max(0, len(self._waiting) - (_LONGEST_CHARACTER - 1)))

    def _show(self, count: int) -> str:
        if not count:
            return ""
        shown, self._waiting = self._waiting[:count], self._waiting[count:]
        text = self._added(shown)
        self._shown = (self._shown + shown)[-_BEHIND:]
        return text

    def _added(self, tokens: Sequence[int]) -> str:
        before = self._decode(self._shown)
        return self._decode([*self._shown, *tokens])[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class ByteText(ByteTokenizer):
    """Bytes, and back."""

    bos: int | None = None

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """The text of what follows ``prompt``."""
        return ByteStream()


class HuggingFaceText(HuggingFaceTokenizer):
    """A Hugging Face tokenizer, and back."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.bos: int | None = self._tokenizer.bos_token_id

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """The text of what follows ``prompt``."""
        return HuggingFaceStream(self._tokenizer, prompt)


def build_text(path: str | None) -> ByteText | HuggingFaceText:
    """Bytes, or the Hugging Face tokenizer in folder ``path``.

    Raises:
        ValueError: If there is no usable tokenizer.
    """
    return ByteText() if path is None else HuggingFaceText(path)
