"""What turns raw scores into attention: scale, mask, sequence boundaries, dropout, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from absorbed_mla.sequences import SequenceLayout


@dataclass(frozen=True)
class Chunk:
    """A run of query tokens and the run of key tokens they may see, both of one sequence.

    Attributes:
        index: Running number of the chunk, which seeds its dropout.
        queries: Slice of the query token axis.
        keys: Slice of the key token axis.
        causal_offset: Query i of the chunk sees keys 0 .. i + causal_offset; None for all keys.
    """

    index: int
    queries: slice
    keys: slice
    causal_offset: int | None


@dataclass(frozen=True)
class ScoreRules:
    """The rules of one attention call, free of tensors of the model.

    Attributes:
        scale: Multiplies the scores before the softmax.
        layout: Sequences along the token axis.
        causal: Whether a token sees only itself and earlier tokens of its sequence.
        attention_mask: Bool, True where a key is hidden; [B or 1, 1, S or 1, S], or None.
        dropout: Probability that an attention probability is dropped.
        dropout_seed: Seed of the dropout pattern; the same seed gives the same pattern.
        query_chunk_size: Largest number of query tokens in a chunk.
    """

    scale: float
    layout: SequenceLayout
    causal: bool
    attention_mask: Tensor | None = None
    dropout: float = 0.0
    dropout_seed: int = 0
    query_chunk_size: int = 256

    def chunks(self) -> Iterator[Chunk]:
        """The chunks that cover every token of every sequence once."""
        index = 0
        for start, end in self.layout.segments():
            for first in range(start, end, self.query_chunk_size):
                last = min(first + self.query_chunk_size, end)
                keys = slice(start, last if self.causal else end)
                offset = first - start if self.causal else None
                yield Chunk(index, slice(first, last), keys, offset)
                index += 1

    def mask(self, scores: Tensor, chunk: Chunk) -> Tensor:
        """Set hidden scores of a chunk [B, N, Q, K] to -inf."""
        if chunk.causal_offset is not None:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(hidden.triu(chunk.causal_offset + 1), -torch.inf)
        if self.attention_mask is not None:
            rows = chunk.queries if self.attention_mask.shape[2] > 1 else slice(None)
            scores = scores.masked_fill(self.attention_mask[:, :, rows, chunk.keys], -torch.inf)
        return scores

    def keep_mask(self, probs: Tensor, chunk: Chunk) -> Tensor | None:
        """Dropout factors of a chunk, 0 or 1 / (1 - dropout), in the shape of ``probs``.

        They are drawn anew from the seed in backward instead of being kept.
        """
        if not self.dropout:
            return None
        generator = torch.Generator(device=probs.device)
        generator.manual_seed(self.dropout_seed + chunk.index)
        draw = torch.rand(probs.shape, generator=generator, device=probs.device)
        return (draw >= self.dropout).to(probs.dtype) / (1 - self.dropout)
