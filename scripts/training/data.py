"""Text files as a stream of tokens, split into windows.

Megatron's sampler asks for windows by their number, counted from the beginning of the run, so a
resumed run reads what the interrupted run would have read.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.utils.data

from training.tokenizers import Tokenizer

# Folders that are not part of the standard library, or differ between machines.
_STDLIB_SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """Tokens of all documents, each ended by the tokenizer's end token.

    Attributes:
        tokens: int32 [n].
        num_documents: Number of documents, one for each file.
        fingerprint: Hash of the tokens.
    """

    tokens: np.ndarray
    num_documents: int
    fingerprint: str


def find_files(path: str | None) -> list[Path]:
    """All files at ``path``; None for the Python sources of the standard library.

    They are ordered by a hash of their names: the same order on every machine, and neighbours come
    from different folders.

    Raises:
        ValueError: If nothing is there.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [
            file
            for file in root.rglob("*.py")
            if not _STDLIB_SKIP.intersection(file.relative_to(root).parts)
        ]
    else:
        root = Path(path)
        if not root.exists():
            raise ValueError(f"--data: there is no file or folder {path}")
        if root.is_file():
            return [root]
        files = [
            file
            for file in root.rglob("*")
            if file.is_file() and not any(x.startswith(".") for x in file.relative_to(root).parts)
        ]
    if not files:
        raise ValueError(f"--data: there are no files in {root}")
    return sorted(files, key=lambda file: _digest(file.relative_to(root).as_posix().encode()))


def read_corpus(path: str | None, tokenizer: Tokenizer) -> Corpus:
    """Read and tokenize all files at ``path``, except those with NUL bytes, which are no text.

    Raises:
        ValueError: If there is no text, or a file cannot be read.
    """
    documents = []
    for file in find_files(path):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ValueError(f"--data: cannot read {file}: {error.strerror}") from error
        if content and b"\0" not in content:
            documents += [tokenizer.encode(content), np.array([tokenizer.eod], dtype=np.int32)]
    if not documents:
        raise ValueError(f"--data: there is no text in {path or 'the standard library'}")
    tokens = np.concatenate(documents)
    return Corpus(tokens, len(documents) // 2, _digest(tokens.tobytes()))


def split_corpus(tokens: np.ndarray, train_percent: float) -> tuple[np.ndarray, np.ndarray]:
    """The first ``train_percent`` of ``tokens`` for training, the rest for validation."""
    cut = round(len(tokens) * train_percent / 100)
    return tokens[:cut], tokens[cut:]


class Windows(torch.utils.data.Dataset):
    """Windows of a stream of tokens without an end, in a new random order in every epoch.

    Args:
        tokens: int32 [n].
        seq_length: Tokens of a sequence; a window has one more, the label of the last token.
        seed: Seed of the order.
        name: Name of the stream in errors.
        period: Number of windows after which they begin again; None: never.

    Raises:
        ValueError: If the stream is shorter than one window.
    """

    def __init__(
        self, tokens: np.ndarray, seq_length: int, seed: int, name: str, period: int | None = None
    ) -> None:
        self.count = (len(tokens) - 1) // seq_length
        if self.count < 1:
            raise ValueError(
                f"--data: {len(tokens)} {name} tokens do not fill one sequence of "
                f"--seq-length {seq_length}; give more text or a shorter sequence"
            )
        self._tokens = tokens
        self.seq_length = seq_length
        self._seed, self._period = seed, period
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    def __len__(self) -> int:
        """More than any run reads."""
        return 2**40

    def __getitem__(self, index: int) -> np.ndarray:
        """Window number ``index``, counted over all epochs, int32 [seq_length + 1]."""
        index = index % self._period if self._period else index
        epoch, position = divmod(index, self.count)
        start = self._order(epoch)[position] * self.seq_length
        return self._tokens[start : start + self.seq_length + 1]

    def _make_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self.count)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
