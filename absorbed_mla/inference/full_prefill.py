"""Prefill in a CUDA graph: whole prompts that attend expanded, beside requests that decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from absorbed_mla.core_attention.key_source import KeyBlock
from absorbed_mla.core_attention.masks.device_spans import DeviceSpans
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.inference.rows import Rows

# Prompts of a step. The tile table has room for one tile of each that its queries do not fill.
MOST_PROMPTS = 4


@dataclass(frozen=True)
class WholePrompts:
    """Rows of one new token each, and behind them prompts of which nothing is cached.

    The host does not know their lengths. So prompts attend to the step's own tokens, of which there
    are as many in every replay, and the other rows to the cache.

    Attributes:
        decoding: All rows; those of prompts have no new token.
        tokens: All tokens of rows that decode are among the first so many.
        spans: The prompts, each over itself.
    """

    decoding: Rows
    tokens: int
    spans: DeviceSpans

    @classmethod
    def of(cls, rows: Rows, tokens: int) -> WholePrompts:
        """Of rows as above, on so many tokens."""
        one = rows.query_lengths == 1
        decoding = Rows(
            rows.query_starts,
            rows.query_lengths * one,
            rows.kv_lengths * one,
            rows.block_table,
            max_query_length=1,
            max_kv_length=rows.max_kv_length,
        )
        spans = DeviceSpans(rows.query_starts, rows.query_lengths * ~one, MOST_PROMPTS)
        return cls(decoding, min(len(rows), tokens), spans)


class OwnKeys:
    """The new tokens of a step as the only keys; a :class:`KeySource`.

    Args:
        spans: Which of them see which.
    """

    num_blocks = 1

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def blocks(self, kv: Tensor, keep: bool) -> Iterator[KeyBlock]:
        """See :class:`KeySource`."""
        yield KeyBlock(kv, self._spans, lambda: torch.arange(len(kv), device=kv.device))
