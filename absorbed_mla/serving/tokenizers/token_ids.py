"""Null tokenizer for Megatron's engine, where requests are token ids already."""

from __future__ import annotations

from collections.abc import Sequence


class IntegerTokenizer:
    """Null tokenizer: a text is its token ids in decimal, separated by spaces.

    Args:
        vocab_size: Number of token ids, from 0.
    """

    bos = eod = -1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        """``"1 22"`` becomes [1, 22]."""
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: Sequence[int], **_) -> str:
        """The inverse of :meth:`tokenize`; further arguments of Megatron's are ignored."""
        return " ".join(map(str, tokens))
