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

from absorbed_mla.serving.tokenizers.folder import load_tokenizer
from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer, HuggingFaceTokenizer

# Folders that are not part of the standard library, or differ between machines.
_STDLIB_SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
Tokenizer = ByteTokenizer | HuggingFaceTokenizer


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


def build_tokenizer(path: str | None, trust_remote_code: bool = False) -> Tokenizer:
    """One token per byte, or the Hugging Face tokenizer in a folder.

    Args:
        path: Folder with the tokenizer's files; None for bytes.
        trust_remote_code: Whether it may run Python code of the folder.

    Raises:
        ValueError: If transformers is missing, the folder has no tokenizer with an end token, or
            the tokenizer has code that may not run.
    """
    if path is None:
        return ByteTokenizer()
    try:
        found = load_tokenizer(Path(path), trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise ValueError(f"--tokenizer: {error}") from error
    if found.eos_token_id is None:
        raise ValueError(f"--tokenizer: the tokenizer in {path} has no eos token")
    # No warning about long documents: they are split into windows later.
    found.model_max_length = 10**12
    return HuggingFaceTokenizer(found)


def find_files(path: str | None) -> list[Path]:
    """All files at ``path``; None for the Python sources of the standard library.

    They are ordered by a hash of their names: the same order on every machine, and neighbours come
    from different folders.

    Raises:
        ValueError: If nothing is there.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
    if not root.exists():
        raise ValueError(f"--data: there is no file or folder {path}")
    if root.is_file():
        return [root]

    files = (file.relative_to(root) for file in root.rglob("*.py" if path is None else "*"))
    names = [x for x in files if not _left_out(x, path is None) and (root / x).is_file()]
    if not names:
        raise ValueError(f"--data: there are no files in {root}")
    return [root / x for x in sorted(names, key=lambda x: _digest(x.as_posix().encode()))]


def _left_out(file: Path, of_stdlib: bool) -> bool:
    if of_stdlib:
        return not _STDLIB_SKIP.isdisjoint(file.parts)
    return any(part.startswith(".") for part in file.parts)


def read_corpus(path: str | None, tokenizer: Tokenizer) -> Corpus:
    """Read and tokenize all files at ``path``, except those with NUL bytes, which are no text.

    Raises:
        ValueError: If there is no text, or a file cannot be read.
    """
    documents, end = [], np.array(tokenizer.end_tokens[:1], dtype=np.int32)
    for file in find_files(path):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ValueError(f"--data: cannot read {file}: {error.strerror}") from error
        if content and b"\0" not in content:
            documents += [_encoded(content, tokenizer), end]
    if not documents:
        raise ValueError(f"--data: there is no text in {path or 'the standard library'}")
    tokens = np.concatenate(documents)
    return Corpus(tokens, len(documents) // 2, _digest(tokens.tobytes()))


def _encoded(content: bytes, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of a file, int32 [n], without any special token."""
    if isinstance(tokenizer, ByteTokenizer):
        return np.frombuffer(content, dtype=np.uint8).astype(np.int32)
    text = content.decode("utf-8", errors="replace")
    return np.array(tokenizer.encode(text, begin=False), dtype=np.int32)


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
