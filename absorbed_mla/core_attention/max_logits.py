"""The largest score of every head, for QK-clip and for logs (Kimi K2, arXiv:2507.20534)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaxLogits:
    """The largest score that each head has had, of all calls so far.

    Attributes:
        of_heads: [N], updated in place. A score is scaled, as the softmax gets it.
        threshold: Largest scores up to this one need not be exact: where a backend would have to
            compute all scores again, it may record an upper bound that is not above the threshold.
    """

    of_heads: Tensor
    threshold: float = -torch.inf

    def heads(self, first: int, count: int) -> Tensor:
        """The part of ``of_heads`` that a call with ``count`` heads, ``first`` on, updates."""
        return self.of_heads[first : first + count]

    def update(self, first_head: int, rows: Tensor) -> None:
        """Take the largest score of each row into account.

        Args:
            first_head: The head that the first head of ``rows`` is.
            rows: [S_q, B, n]; -inf for a query that sees no key.
        """
        if not rows.numel():
            return
        heads = self.heads(first_head, rows.shape[2])
        torch.maximum(heads, rows.amax((0, 1)).to(heads.dtype), out=heads)
