"""Vocabulary padding of Megatron's embeddings: checks that removing it loses no token's row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from checkpoint_conversion.checkpoint_folder import CONFIG, MAX_CONFIG_BYTES, read_json
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.model import text_fields

_TP = "tensor_model_parallel_size"


def check_padding(
    vocabulary: int,
    padding: int,
    auxiliary: Mapping[str, Path],
    args: Mapping[str, object],
    drop_tokens: bool,
) -> list[str]:
    """Check that rows beyond the vocabulary are padding by all that the checkpoint says of itself.

    Args:
        vocabulary: Entries by the config.json, or arguments, that describe the model.
        padding: Rows of the embedding after them.
        auxiliary: Files beside the weights, perhaps with a config.json.
        args: The training's arguments; empty if the checkpoint has none.
        drop_tokens: Accept that rows of tokens are dropped.

    Returns:
        A note, if there are such rows.

    Raises:
        CheckpointError: If some are tokens by the checkpoint's own config.json or arguments, or too
            many for padding.
    """
    if padding <= 0:
        return []
    why = _why_tokens(vocabulary, padding, auxiliary, args)
    if why is None:
        return [f"{padding} rows of padding after the vocabulary are dropped"]
    dropped = f"{padding} rows of the embedding, after {vocabulary} by its config.json,"
    if drop_tokens:
        return [f"{dropped} are dropped (--drop-tokens), though {why}"]
    raise CheckpointError(
        f"{dropped} would be lost, though {why}. Give the config.json of this model, or "
        "--drop-tokens (drop_tokens=True)"
    )


def _why_tokens(
    vocabulary: int, padding: int, auxiliary: Mapping[str, Path], args: Mapping[str, object]
) -> str | None:
    """What says that some of the rows are tokens; None if nothing does."""
    if CONFIG in auxiliary:
        size = text_fields(read_json(auxiliary[CONFIG], MAX_CONFIG_BYTES)).get("vocab_size")
        if _larger(size, vocabulary):
            return f"the checkpoint's own config.json has a vocab_size of {size}"
    # Without the tokens that a tokenizer of Megatron's adds.
    size = args.get("vocab_size")
    if _larger(size, vocabulary):
        return f"the checkpoint's arguments have a vocab_size of {size}"
    multiple, tp = (args.get(name) for name in ("make_vocab_size_divisible_by", _TP))
    if isinstance(multiple, int) and isinstance(tp, int) and 0 < multiple * tp <= padding:
        return (
            f"padding to a multiple of {multiple * tp} (make_vocab_size_divisible_by {multiple} by "
            f"{_TP} {tp}) has fewer"
        )
    return None


def _larger(size: object, vocabulary: int) -> bool:
    return isinstance(size, int) and size > vocabulary
