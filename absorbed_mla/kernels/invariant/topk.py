"""The k largest elements, in an order that neither the algorithm nor the caller decides."""

from __future__ import annotations

import torch
from torch import Tensor


def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """The first k elements of a stable sort, of which there is one only, ties included.

    ``sorted`` is not asked: Megatron's router (0.19.2) sorts in training and not in inference, and
    then adds up the scores in that order.
    """
    if not x.ndim:
        return x.clone(), torch.zeros_like(x, dtype=torch.long)
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k).clone(), indices.narrow(dim, 0, k).clone()
