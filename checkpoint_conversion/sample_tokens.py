"""Token ids to compare two models on: of a text, by the checkpoint's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from checkpoint_conversion.errors import CheckpointError

TEXT = """\
Keeping every key and value of a long conversation is what makes serving a language model dear. A
latent attention keeps less: for each token one short vector, from which the keys and the values of
all heads can be computed again, and a few rotated channels that say where the token stood.

def attend(query, latent, rotated, scale):
    scores = scale * (query.nope @ latent.T + query.rope @ rotated.T)
    return softmax(scores.masked_fill(future, -inf)) @ latent

Two programs that hold the same weights ought to agree about what comes next. If one of them turns
the channels of its rotary embedding by pairs of neighbours, and the other by halves, both still
write fluent sentences at first; after some hundred words, they part. In 2024 it was 3.14 % of all
tickets; les chiffres de 2025 n'en disent pas plus, und die Gründe sind bis heute unklar: \
これは何ですか?
"""
# Bytes of a user's file that are read; a model takes far fewer tokens.
_MOST_BYTES = 16 << 20


def sample_tokens(
    auxiliary: Mapping[str, Path], vocab_size: int, most: int, text: Path | None = None
) -> tuple[list[int], str]:
    """Token ids of a text.

    Args:
        auxiliary: Files that belong to the checkpoint; its ``tokenizer.json`` is used if there.
        vocab_size: Ids stay below.
        most: At most so many tokens, from the beginning of the text.
        text: A file of UTF-8 text; None for a text of our own.

    Returns:
        The ids, and a sentence about where they come from.

    Raises:
        CheckpointError: If the text is empty or no UTF-8, or the tokenizer cannot be used.
    """
    content = TEXT if text is None else _read(text)
    source = "a built-in text" if text is None else text.name
    if "tokenizer.json" not in auxiliary:
        ids = [byte % vocab_size for byte in content.encode()[:most]]
        return ids, f"{len(ids)} bytes of {source}; the checkpoint has no tokenizer.json"
    ids = _tokenize(auxiliary["tokenizer.json"], content)[:most]
    if not ids or max(ids) >= vocab_size:
        raise CheckpointError(
            f"tokenizer.json makes {len(ids)} tokens of {source}, the largest {max(ids, default=0)}"
            f"; the model's vocabulary has {vocab_size}"
        )
    return ids, f"{len(ids)} tokens of {source}, by the checkpoint's tokenizer.json"


def _read(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"--text: {path} is no UTF-8 text: {error}") from None
    if not text.strip():
        raise CheckpointError(f"--text: {path} is empty")
    return text


def _tokenize(path: Path, text: str) -> list[int]:
    # A data file, unlike the tokenizers that need code of the checkpoint.
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path)).encode(text).ids
    except Exception as error:
        # The library raises nothing more specific.
        raise CheckpointError(f"{path} is no tokenizer: {error}") from None
