"""The order in which tensors are added: a binary tree over neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tree_sum(summands: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape: of every two neighbours, then of every two of these sums.

    A last one without neighbour is added a level further up.
    """
    level = list(summands)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2])
        level = [torch.add(*pair) for pair in pairs] + level[len(level) & ~1 :]
    return level[0]
