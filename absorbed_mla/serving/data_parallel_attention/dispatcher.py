"""The token dispatcher of data-parallel attention: tokens of all ranks, this rank's experts."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor


class LocalDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron's dispatcher of gathered tokens, with a mode in which no size depends on them.

    In that mode, which CUDA graphs need and Megatron switches on for the steps that it pads, every
    expert of this rank computes every token, and those that are not its own have probability 0.

    Attributes:
        drop_and_pad: Whether it is on, under the name that Megatron sets.
    """

    drop_and_pad = False

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of this rank's experts one after the other, their numbers and probabilities."""
        if not self.drop_and_pad:
            return super().dispatch_postprocess(hidden_states, probs)
        count, own = self.num_local_experts, self.local_expert_indices
        tokens = torch.full((count,), len(hidden_states))
        own_probs = probs[:, own[0] : own[-1] + 1].T.flatten()
        return hidden_states.repeat(count, 1), tokens, own_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The sum over this rank's experts."""
        if not self.drop_and_pad:
            return super().combine_preprocess(hidden_states)
        return hidden_states.unflatten(0, (self.num_local_experts, -1)).sum(0)
