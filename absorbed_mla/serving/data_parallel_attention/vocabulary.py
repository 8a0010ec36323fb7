"""Embedding and output layer whose vocabulary is sharded over data-parallel attention ranks."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from torch import Tensor

from absorbed_mla.serving.data_parallel_attention.exchange import TokenExchange


class ShardedEmbedding(VocabParallelEmbedding):
    """Megatron's embedding, of which each rank has some rows.

    It is the first layer of a forward pass, and tells the others how many tokens every rank has.
    """

    def __init__(self, *host: Any, exchange: TokenExchange, **more: Any) -> None:
        super().__init__(*host, tp_group=exchange.group, **more)
        self.exchange = exchange

    def forward(self, input_: Tensor) -> Tensor:
        """Token ids [B, S] to [B, S, H].

        Raises:
            ValueError: If the model is not in evaluation mode.
        """
        if self.training:
            raise ValueError("data-parallel attention is for inference: call model.eval() first")
        exchange = self.exchange
        exchange.tokens = exchange.counts(input_.numel())
        ids = exchange.gather(input_.flatten(), exchange.tokens)
        first, end = self.vocab_start_index, self.vocab_end_index
        elsewhere = (ids < first) | (ids >= end)
        found = F.embedding((ids - first).masked_fill(elsewhere, 0), self.weight)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        return exchange.sum_own(found, exchange.tokens).view(*input_.shape, -1)


class ShardedOutput(ColumnParallelLinear):
    """Megatron's output layer, of which each rank has the rows of some tokens of the vocabulary."""

    def __init__(self, *host: Any, exchange: TokenExchange, **more: Any) -> None:
        super().__init__(*host, tp_group=exchange.group, **more)
        self.exchange = exchange

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Hidden states [S, B, H] to logits of the whole vocabulary, [S, B, V]; None is the bias.

        Args:
            input_: Hidden states; of a step's last tokens alone where others are not needed.
            weight: That of the embedding, where both share one.
            runtime_gather_output: Not used: every rank gets all logits of its tokens.
        """
        rows = input_.flatten(0, 1)
        counts = self.exchange.counts(len(rows))
        part = F.linear(
            self.exchange.gather(rows, counts), self.weight if weight is None else weight
        )
        return self.exchange.join_own(part, counts).view(*input_.shape[:2], -1), None
