"""The token dispatcher of grouped experts: permutes tokens to this rank's experts and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from absorbed_mla.serving.experts.permuted_tokens import PermutedTokens


class GroupedDispatcher(MoETokenDispatcher):
    """A rank computes what its experts, or its parts of them, give for the tokens of all ranks.

    Under sequence parallelism each of the ranks has some of the tokens: it sends them to all others
    and gets a sum for them back. Otherwise all of them have all tokens.

    Args:
        num_local_experts: This rank's.
        local_expert_indices: Their numbers, one after the other.
        config: Of the model.
        pg_collection: Process groups; those of ``tp_ep`` share the tokens' experts.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: Any,
        pg_collection: Any,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._count = num_local_experts
        self._several = self.tp_ep_group.size() > 1
        self._divided = self._several and config.sequence_parallel
        whole = num_local_experts == config.num_moe_experts
        self._first = None if whole else local_expert_indices[0]

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens [S, B, H] as [T, H].

        Args:
            tokens: Hidden states of this rank's tokens.
            routing_map: Int64 [T, K], the experts that they chose.
            probs: [T, K], of these experts.
        """
        self._shape, self._chosen = tokens.shape, routing_map
        return tokens.flatten(0, -2), probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of all ranks, and their probabilities."""
        if not self._divided:
            return hidden_states, probs
        group = self.tp_ep_group
        self._chosen = gather_from_sequence_parallel_region(self._chosen, group=group)
        return (
            gather_from_sequence_parallel_region(hidden_states, group=group),
            gather_from_sequence_parallel_region(probs, group=group),
        )

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, PermutedTokens, Tensor]:
        """Tokens for the experts, the rows that these make of them, and all probabilities."""
        self._rows = PermutedTokens.of(self._chosen, self._count, self._first)
        del self._chosen
        return hidden_states, self._rows, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums over each token's experts on this rank, [T, H]."""
        rows = self._rows
        del self._rows
        return rows.summed(hidden_states)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sums over all ranks, for this rank's tokens."""
        if self._divided:
            return reduce_scatter_to_sequence_parallel_region(hidden_states, group=self.tp_ep_group)
        if self._several:
            return reduce_from_tensor_model_parallel_region(hidden_states, group=self.tp_ep_group)
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[T, H] as [S, B, H]."""
        return hidden_states.view(self._shape)
