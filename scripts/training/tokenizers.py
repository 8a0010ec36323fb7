"""Tokenizers: one token per byte, or a Hugging Face tokenizer from a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """A tokenizer for training data."""

    vocab_size: int
    eod: int  # ends every document

    def encode(self, content: bytes) -> np.ndarray:
        """Token ids of the content of a file, int32 [n], without the end-of-document token."""


class ByteTokenizer:
    """Every byte is a token; token 256 ends a document."""

    vocab_size = 257
    eod = 256

    def encode(self, content: bytes) -> np.ndarray:
        """The values of the bytes, int32 [n]."""
        return np.frombuffer(content, dtype=np.uint8).astype(np.int32)


class HuggingFaceTokenizer:
    """A tokenizer that ``transformers`` loads from a local folder.

    Args:
        path: Folder with the tokenizer's files.
        trust_remote_code: Whether it may run Python code of the folder.

    Raises:
        ValueError: If transformers is missing, the folder has no tokenizer with an end token, or
            the tokenizer has code that may not run.
    """

    def __init__(self, path: str, trust_remote_code: bool = False) -> None:
        from absorbed_mla.serving.tokenizers.folder import load_tokenizer

        if not Path(path).exists():
            raise ValueError(f"--tokenizer: there is no folder {path}")
        try:
            self._tokenizer = load_tokenizer(Path(path), trust_remote_code=trust_remote_code)
        except ValueError as error:
            raise ValueError(f"--tokenizer: {error}") from error
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"--tokenizer: the tokenizer in {path} has no eos token")
        # No warning about long documents: they are split into windows later.
        self._tokenizer.model_max_length = 10**12
        self.vocab_size = len(self._tokenizer)
        self.eod = self._tokenizer.eos_token_id

    def encode(self, content: bytes) -> np.ndarray:
        """Token ids of the content, decoded as UTF-8, int32 [n]."""
        text = content.decode("utf-8", errors="replace")
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray(ids, dtype=np.int32)


def build_tokenizer(path: str | None, trust_remote_code: bool = False) -> Tokenizer:
    """The byte tokenizer, or the Hugging Face tokenizer in folder ``path``."""
    return ByteTokenizer() if path is None else HuggingFaceTokenizer(path, trust_remote_code)
