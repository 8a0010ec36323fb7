"""The bytes of single tokens of a Hugging Face tokenizer."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any


class TokenBytes:
    """What each token of a tokenizer of ``transformers`` adds to a text, as bytes.

    In a byte-level vocabulary (GPT-2, DeepSeek, Qwen, Llama 3) every token is bytes, which may be
    part of a character. With byte fallback (SentencePiece: Llama 2, MiniCPM3) some are one byte
    each, such as ``<0xE2>``, and the others are text.

    Args:
        tokenizer: Of ``transformers``.

    Attributes:
        byte_level: Whether the text of tokens is their bytes, joined and decoded as UTF-8.
        special: Tokens that ``skip_special_tokens`` leaves out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        steps = self._decoding_steps()
        self.byte_level = steps == ["ByteLevel"]
        self._fallback_bytes: dict[int, int] = {}
        if "ByteFallback" in steps:
            numbers = {byte: self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
            self._fallback_bytes = {n: byte for byte, n in numbers.items() if n is not None}
        self.special = self._special_tokens()
        self._found: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """The token's bytes in the middle of a text; none for a number without a token."""
        found = self._found.get(token)
        if found is None:
            found = self._found[token] = self._find(token)
        return found

    def seen(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> list[int]:
        """The tokens that ``decode`` sees: not numbers without a token, nor special ones."""
        left_out = self.special if skip_special_tokens else ()
        return [token for token in tokens if token not in left_out and self._exists(token)]

    @property
    def takes_all_text(self) -> bool:
        """Whether there are tokens for all bytes, so that none stands for what is unknown."""
        return self.byte_level or len(self._fallback_bytes) == 256

    def fallback_byte(self, token: int) -> int | None:
        """The byte that the token stands for with byte fallback; None: it is text."""
        return self._fallback_bytes.get(token)

    def _find(self, token: int) -> bytes:
        if self.byte_level:
            name = self._backend.id_to_token(token) or ""
            table = bytes_of_characters()
            # A token that was added may have other characters: it is text.
            return bytes(table[c] for c in name) if table.keys() >= set(name) else name.encode()
        byte = self.fallback_byte(token)
        if byte is not None:
            return bytes([byte])
        if not self._exists(token):
            return b""
        # Some decoders drop a space at the beginning of a text.
        once, twice = self._decode([token]), self._decode([token, token])
        return (twice[len(once) :] if twice.startswith(once) else once).encode()

    def _exists(self, token: int) -> bool:
        """Whether the number is that of a token; others have no text."""
        return self._backend is None or self._backend.id_to_token(token) is not None

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    def _decoding_steps(self) -> list[str]:
        """Types of the steps of the tokenizer's decoder; none if it is not of ``tokenizers``."""
        if self._backend is None or self._backend.decoder is None or not self._decodes_as_usual():
            return []
        try:
            made = json.loads(self._backend.decoder.__getstate__())
        # One of somebody's own, in Python, has no type.
        except Exception:
            return []
        return [step["type"] for step in made.get("decoders", [made])]

    def _decodes_as_usual(self) -> bool:
        """Whether ``decode`` is what ``tokenizers`` decodes, and not a method of the model's."""
        kind = type(self._tokenizer)
        methods = (getattr(kind, name, None) for name in ("decode", "_decode"))
        usual = "transformers.tokenization_utils"
        return all(getattr(one, "__module__", "").startswith(usual) for one in methods)

    def _special_tokens(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset(getattr(self._tokenizer, "all_special_ids", ()))
        added = self._backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)


@functools.cache
def bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
