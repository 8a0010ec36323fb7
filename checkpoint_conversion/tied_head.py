"""The output layer of a tied model, which some trainers store beside the embedding."""

from __future__ import annotations

from collections.abc import Mapping

from checkpoint_conversion.lazy_tensor import LazyTensor, same_values
from checkpoint_conversion.mapping import own_name
from checkpoint_conversion.mapping_table import MODEL
from checkpoint_conversion.model import ModelConfig

_TIED = ("model.embed_tokens.weight", "lm_head.weight")
_DIFFERS = (
    "must be equal where tie_word_embeddings is true, but differ; with false both are weights"
)


def without_tied_head(
    tensors: Mapping[str, LazyTensor], config: ModelConfig, problems: list[str]
) -> dict[str, LazyTensor]:
    """The tensors without an output layer that is a copy of the embedding.

    The two are compared bit by bit when the embedding is loaded.

    Args:
        tensors: Under Hugging Face's or Megatron's names.
        config: Of the model; one that is not tied needs its output layer.
        problems: Receives a line if the two cannot be equal.
    """
    result = dict(tensors)
    rows = [next(row for row in MODEL if row.hugging_face == name) for name in _TIED]
    own = [own_name(config, name) for name in _TIED]
    for first, head in (own, [row.megatron for row in rows]):
        if not config.tied_embeddings or first not in result or head not in result:
            continue
        copies = [result[first], result.pop(head)]
        kinds = [f"{tensor.dtype} {tensor.shape}" for tensor in copies]
        if len(set(kinds)) > 1:
            problems.append(
                f"{head} is {kinds[1]}; tie_word_embeddings says it is {first}, which is {kinds[0]}"
            )
        else:
            result[first] = same_values(copies, _DIFFERS)
    return result
