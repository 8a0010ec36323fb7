"""Text of generated tokens, piece by piece while they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from absorbed_mla.serving.tokenizers.token_bytes import TokenBytes

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_new_decoder = codecs.getincrementaldecoder("utf-8")
# Tokens that new ones are decoded after, at least: some tokenizers drop a space at the beginning of
# a text.
_CONTEXT = 8
# At most: with every token that is dropped, the text of the others has to be decoded anew.
_MOST_CONTEXT = 16
# Tokens whose text may yet change that are held back, at most. Bytes of a run that is longer are
# shown as they come.
_LONGEST_WAIT = 64


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
        self._decoder = _new_decoder(errors="replace")

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


def hugging_face_stream(
    tokenizer: Any,
    prompt: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    token_bytes: TokenBytes | None = None,
) -> TextStream:
    """Text of the tokens of a Hugging Face tokenizer: the pieces join to what ``decode`` gives.

    Without the clean-up of spaces, which would change what has been shown. With byte fallback one
    wrong byte makes U+FFFD of all of the run of bytes that it is in, also of whole characters
    before it; so such a run is held back until it ends. One of more than 64 bytes is not: its
    characters are shown as they come, and stay.

    Args:
        tokenizer: Of ``transformers``.
        prompt: Token ids before the first one.
        skip_special_tokens: Whether the tokenizer's special tokens have no text.
        token_bytes: Of the tokenizer, which several streams may share.
    """
    table = TokenBytes(tokenizer) if token_bytes is None else token_bytes
    if table.byte_level:
        return _ByteLevelStream(table, prompt, skip_special_tokens)
    return _DecodingStream(tokenizer, table, prompt, skip_special_tokens)


class _ByteLevelStream:
    """Text of tokens that are bytes each."""

    def __init__(self, table: TokenBytes, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._table = table
        self._left_out = table.special if skip_special_tokens else frozenset()
        self._decoder = _new_decoder(errors="replace")
        # Bytes of a character that the prompt begins, until the first token.
        self._before = b""
        if prompt:
            self._decoder.decode(self._bytes(prompt[-_CONTEXT:]))
            self._before = self._decoder.getstate()[0]
            self._decoder.reset()

    def push(self, tokens: Sequence[int]) -> str:
        """See :class:`TextStream`."""
        data = self._bytes(tokens)
        if self._before and data:
            # A byte that continues a character.
            if 0x80 <= data[0] < 0xC0:
                data = self._before + data
            self._before = b""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """See :class:`TextStream`."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        # A number without a token has no bytes.
        return b"".join([self._table.of(token) for token in tokens if token not in self._left_out])


class _DecodingStream:
    """Text of any tokens: the tokenizer decodes new ones together with some before them.

    Args:
        tokenizer: Of ``transformers``.
        table: Of the tokenizer.
        prompt: Token ids before the first one.
        skip_special_tokens: Whether special tokens have no text.
    """

    def __init__(
        self, tokenizer: Any, table: TokenBytes, prompt: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer, self._table, self._skip = tokenizer, table, skip_special_tokens
        before = table.seen(prompt[-_LONGEST_WAIT:], skip_special_tokens=skip_special_tokens)
        # The bytes of a run that goes on behind the prompt are not decoded with these.
        while len(before) > 1 and table.fallback_byte(before[-1]) is not None:
            del before[-1]
        self._shown = before[-_CONTEXT:]
        self._text_of_shown = self._decode(self._shown)
        self._waiting: list[int] = []
        self._run: _ByteRun | None = None

    def push(self, tokens: Sequence[int]) -> str:
        """See :class:`TextStream`."""
        seen = self._table.seen(tokens, skip_special_tokens=self._skip)
        return "".join([self._next(token) for token in seen])

    def finish(self) -> str:
        """See :class:`TextStream`."""
        return self._end_run() + self._show(self._decode([*self._shown, *self._waiting]))

    def _next(self, token: int) -> str:
        byte = self._table.fallback_byte(token)
        if byte is not None:
            return self._next_byte(token, byte)
        end = self._end_run()
        self._waiting.append(token)
        text = self._decode([*self._shown, *self._waiting])
        if text.endswith(_REPLACEMENT) and len(self._waiting) < _LONGEST_WAIT:
            return end
        return end + self._show(text)

    def _next_byte(self, token: int, byte: int) -> str:
        before = ""
        if self._run is None:
            before = self._show(self._decode([*self._shown, *self._waiting]))
            self._run = _ByteRun()
        found = self._run.push(byte)
        if found is None:
            self._waiting.append(token)
            return before
        # Whatever comes after the run is not at the beginning of a text.
        self._shown, self._waiting = [token], []
        self._text_of_shown = self._decode(self._shown)
        return before + found

    def _end_run(self) -> str:
        run, self._run = self._run, None
        return "" if run is None else run.finish()

    def _show(self, text: str) -> str:
        """What waiting tokens add; ``text``: of them and those shown."""
        if not self._waiting:
            return ""
        before = self._text_of_shown
        if not text.startswith(before):
            # They complete a character that the prompt begins.
            before = before.rstrip(_REPLACEMENT)
        shown = [*self._shown, *self._waiting]
        self._waiting, self._text_of_shown = [], text
        if len(shown) > _MOST_CONTEXT:
            shown = shown[-_CONTEXT:]
            self._text_of_shown = self._decode(shown)
        self._shown = shown
        return text[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            tokens,
            skip_special_tokens=self._skip,
            clean_up_tokenization_spaces=False,
        )


class _ByteRun:
    """Tokens in a row that are one byte each: all of them are text, or none is."""

    def __init__(self) -> None:
        self._held: bytearray | None = bytearray()
        self._decoder = _new_decoder(errors="replace")
        self._is_text = True

    def push(self, byte: int) -> str | None:
        """The text that a byte completes; None: the run may yet turn out to be no text."""
        data = bytes([byte])
        if self._held is not None:
            self._held += data
            if len(self._held) < _LONGEST_WAIT:
                return None
            data, self._held = bytes(self._held), None
            self._is_text = _begins_text(data)
        return self._decoder.decode(data) if self._is_text else _REPLACEMENT * len(data)

    def finish(self) -> str:
        """The rest; nothing if no byte has been shown."""
        return self._decoder.decode(b"", final=True)


def _begins_text(data: bytes) -> bool:
    """Whether bytes are UTF-8, but for a character that is incomplete at their end."""
    try:
        _new_decoder().decode(data)
    except UnicodeDecodeError:
        return False
    return True
