"""Padding of the vocabulary: Megatron rounds the rows of embedding and output layer up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from checkpoint_conversion.lazy_tensor import LazyTensor, concat, zeros

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def padded_size(vocab_size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that has room for ``vocab_size`` rows."""
    return -(-vocab_size // multiple) * multiple


def with_padding(tensors: Mapping[str, LazyTensor], rows: int) -> dict[str, LazyTensor]:
    """Append rows of zeros to embedding and output layer until they have ``rows``."""
    result = dict(tensors)
    for name in VOCABULARY:
        tensor = tensors.get(name)
        if tensor is not None and rows > tensor.shape[0]:
            padding = zeros((rows - tensor.shape[0], *tensor.shape[1:]), tensor.dtype)
            result[name] = concat([tensor, padding])
    return result


def without_padding(
    tensors: Mapping[str, LazyTensor], vocab_size: int
) -> tuple[dict[str, LazyTensor], int]:
    """Drop the rows beyond the vocabulary, which no token uses.

    Returns:
        The tensors, and how many rows each of the two lost.
    """
    result, dropped = dict(tensors), 0
    for name in VOCABULARY:
        tensor = tensors.get(name)
        if tensor is not None and tensor.shape and tensor.shape[0] > vocab_size:
            dropped = tensor.shape[0] - vocab_size
            kept = tensor.narrow(0, 0, vocab_size)
            # Where ranks share the rows, the last may have nothing but padding.
            result[name] = dataclasses.replace(kept, leaves=tensor.leaves)
    return result, dropped
