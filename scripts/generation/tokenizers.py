"""Tokenizers of train.py that also turn generated tokens into text."""

from __future__ import annotations

from collections.abc import Sequence

from absorbed_mla.generation.text import ByteStream, HuggingFaceStream, TextStream
from training.tokenizers import ByteTokenizer, HuggingFaceTokenizer


class ByteText(ByteTokenizer):
    """Every byte is a token."""

    bos: int | None = None

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """Text of the tokens that follow ``prompt``."""
        return ByteStream(self.eod)


class HuggingFaceText(HuggingFaceTokenizer):
    """A Hugging Face tokenizer from a local folder."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.bos: int | None = self._tokenizer.bos_token_id

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """Text of the tokens that follow ``prompt``."""
        return HuggingFaceStream(self._tokenizer, prompt)


def build_text(path: str | None) -> ByteText | HuggingFaceText:
    """Bytes, or the Hugging Face tokenizer in folder ``path``.

    Raises:
        ValueError: If there is no usable tokenizer.
    """
    return ByteText() if path is None else HuggingFaceText(path)
