"""Permuted tokens: the order of (token, expert) pairs by expert, and each expert's bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.moe_utils import unpermute
from torch import Tensor

from absorbed_mla.batch_invariant import is_enabled


@dataclass(frozen=True)
class PermutedTokens:
    """Rows sorted by expert, of T tokens that choose K experts each; no size depends on values.

    Attributes:
        choices: Int64 [T * K], the choice (token times K, plus its number) that each row is for.
        tokens: Int64 [T * K], the token of each row.
        places: Int64 [T, K], the row of every choice: the inverse of ``choices``.
        ends: Int32 [E], the row behind the last one of each of this rank's experts. Rows behind
            the last end belong to experts of other ranks.
    """

    choices: Tensor
    tokens: Tensor
    places: Tensor
    ends: Tensor

    @classmethod
    def of(cls, chosen: Tensor, count: int, first: int | None = None) -> PermutedTokens:
        """Rows of what tokens chose, those of one expert in the order of tokens.

        Args:
            chosen: Int64 [T, K], numbers of experts among those of all ranks.
            count: How many experts this rank has.
            first: Number of its first expert; None if it has all of them.
        """
        if chosen.is_cuda:
            # Imported here, because machines without a GPU need not have Triton.
            from absorbed_mla.kernels.moe.order import MOST_CHOICES, order_by_expert

            if chosen.numel() <= MOST_CHOICES:
                return cls(*order_by_expert(chosen, count, first or 0))
        return cls.by_sorting(chosen, count, first)

    @classmethod
    def by_sorting(cls, chosen: Tensor, count: int, first: int | None = None) -> PermutedTokens:
        """As :meth:`of`, by PyTorch's operators, for any number of choices."""
        experts = chosen.flatten()
        if first is not None:
            experts = experts - first
            experts = experts.masked_fill((experts < 0) | (experts >= count), count)
        in_order, choices = experts.sort(stable=True)
        numbers = torch.arange(max(count, len(choices)), device=chosen.device)
        ends = torch.searchsorted(in_order, numbers[:count], right=True, out_int32=True)
        places = torch.empty_like(choices).scatter_(0, choices, numbers[: len(choices)])
        return cls(choices, choices // chosen.shape[1], places.view_as(chosen), ends)

    def choices_of(self, x: Tensor) -> Tensor:
        """The rows' values of choices: [T, K] to [T * K]."""
        return x.flatten().index_select(0, self.choices)

    def summed(self, x: Tensor) -> Tensor:
        """Sums over the rows of each token, in the order of its choices: [T * K, H] to [T, H].

        Rows of experts of other ranks count for nothing, whatever they hold. In parity mode there
        are none, and sums are those of Megatron's dispatchers, in the order of rows.
        """
        parity = is_enabled(x.device)
        if x.is_cuda:
            # Imported here, because machines without a GPU need not have Triton.
            from absorbed_mla.kernels.moe.sums import summed

            return summed(x, self.places, self.ends, one_by_one=parity)
        if parity:
            return unpermute(x, self.tokens, torch.Size((len(self.places), x.shape[1])))
        others = torch.arange(len(x)) >= self.ends[-1]
        x = x.masked_fill(others.unsqueeze(1), 0)
        return x.index_select(0, self.places.flatten()).unflatten(0, self.places.shape).sum(1)
