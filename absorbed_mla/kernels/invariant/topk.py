"""``torch.topk`` with one order of the elements, whatever the algorithm and the arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """The first k elements of a stable sort, which also fixes the order of equal elements.

    ``sorted`` is ignored: Megatron's router (0.19.2) passes True in training, False in inference,
    and adds up the scores in the order that it gets.
    """
    if not x.ndim:
        return x.clone(), torch.zeros_like(x, dtype=torch.long)
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k).clone(), indices.narrow(dim, 0, k).clone()
