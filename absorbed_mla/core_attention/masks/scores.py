"""Score rules: scale, causal and padding mask, sequence boundaries and dropout of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.dropout import keep_factors
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.max_logits import MaxLogits


@dataclass(frozen=True, eq=False)
class Sink:
    """An attention sink, which the kernel of a backend adds.

    Attributes:
        logits: [N].
        gradients: Where backward appends the gradients fp32 that it has found, of heads in their
            order; nothing where the backend leaves it to ``sink_gradient``.
    """

    logits: Tensor
    gradients: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class ScoreRules:
    """How raw scores become probabilities in one attention call.

    It holds no activation, and of the weights the sink only.

    Attributes:
        scale: Multiplies the scores before the softmax.
        spans: Which queries may see which keys. A query is in at most one span.
        attention_mask: Bool, True where a key is hidden; [B or 1, 1, S_q or 1, S_k], or None.
        dropout: Probability that an attention probability is dropped.
        dropout_seed: Seed of the dropout pattern; the same seed gives the same pattern.
        query_tokens: int64 [S_q], the token of the whole batch or pack that each query is; needed
            for dropout, whose pattern must not depend on which rank or chunk computes a pair.
        key_tokens: int64 [S_k], likewise.
        first_head: Index of the first head among those of the tensor-parallel rank.
        query_chunk_size: Largest number of query tokens in a chunk.
        max_logits: Where forward records the largest scores, or None.
        window: How many keys up to its own position a query sees, where that are fewer than the
            spans show to some; set for backends with ``windows`` only. Every span has an offset.
        sink: That of all heads, if output and LSE are to be those beside it; set for backends with
            ``sinks`` only, where the spans show all keys that there are.
    """

    scale: float
    spans: Spans
    attention_mask: Tensor | None = None
    dropout: float = 0.0
    dropout_seed: int = 0
    query_tokens: Tensor | None = None
    key_tokens: Tensor | None = None
    first_head: int = 0
    query_chunk_size: int = 256
    max_logits: MaxLogits | None = None
    window: int | None = None
    sink: Sink | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", Spans(self.spans))

    def chunks(self) -> Iterator[Span]:
        """The spans, cut into parts of at most ``query_chunk_size`` queries."""
        return self.spans.chunks(self.query_chunk_size)

    def on_keys(self, spans: Spans, tokens: Callable[[], Tensor]) -> ScoreRules:
        """The rules for one block of keys.

        Args:
            spans: Which queries see which keys of the block.
            tokens: Makes the block's ``key_tokens``, by which the mask's last axis is indexed.
        """
        mask = self.attention_mask
        if mask is None and not self.dropout:
            return self._but(spans=Spans(spans))
        key_tokens = tokens()
        # A block as long as the mask holds all keys in their order.
        if mask is not None and len(key_tokens) != mask.shape[3]:
            mask = mask.index_select(3, key_tokens)
        return self._but(spans=Spans(spans), attention_mask=mask, key_tokens=key_tokens)

    def for_heads(self, first: int) -> ScoreRules:
        """The rules for the heads from ``first`` on."""
        return self._but(first_head=self.first_head + first) if first else self

    def sink_of(self, heads: int) -> Tensor | None:
        """The sink's logits of so many heads from ``first_head`` on."""
        return None if self.sink is None else self.sink.logits.narrow(0, self.first_head, heads)

    def _but(self, **changes: Any) -> ScoreRules:
        """The same rules with some changes, made in a tenth of ``dataclasses.replace``'s time."""
        rules = object.__new__(ScoreRules)
        vars(rules).update(vars(self), **changes)
        return rules

    def record(self, rows: Tensor) -> None:
        """Record the largest scores of rows [S_q, B, heads], if they are wanted."""
        if self.max_logits is not None:
            self.max_logits.update(self.first_head, rows)

    def mask(self, scores: Tensor, chunk: Span) -> Tensor:
        """Set hidden scores of a chunk [B, N, Q, K] to -inf."""
        if chunk.causal_offset is not None:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(hidden.triu(chunk.causal_offset + 1), -torch.inf)
        if self.attention_mask is not None:
            rows = chunk.queries if self.attention_mask.shape[2] > 1 else slice(None)
            scores = scores.masked_fill(self.attention_mask[:, :, rows, chunk.keys], -torch.inf)
        return scores

    def keep_mask(self, probs: Tensor, chunk: Span) -> Tensor | None:
        """Dropout factors of a chunk, 0 or 1 / (1 - dropout), in the shape of ``probs``.

        Backward computes them again from the seed instead of storing them.
        """
        if not self.dropout:
            return None
        assert self.query_tokens is not None and self.key_tokens is not None
        batch, heads = probs.shape[:2]
        return keep_factors(
            self.dropout,
            self.dropout_seed,
            batch=torch.arange(batch, device=probs.device),
            heads=torch.arange(heads, device=probs.device) + self.first_head,
            queries=self.query_tokens[chunk.queries],
            keys=self.key_tokens[chunk.keys],
        ).to(probs.dtype)
