"""``torch.topk`` with one order of the elements, whatever the algorithm and the arguments."""

from __future__ import annotations

import torch
from torch import Tensor

# Of rows for the kernel, which finds one element after the other: a sort finds many sooner.
MOST_COLUMNS, MOST_FOUND = 512, 32
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """The first k elements of a stable sort, which also fixes the order of equal elements.

    ``sorted`` is ignored: Megatron's router (0.19.2) passes True in training, False in inference,
    and adds up the scores in the order that it gets.
    """
    if not x.ndim:
        return x.clone(), torch.zeros_like(x, dtype=torch.long)
    if x.is_cuda and is_of_short_rows(x, k, dim):
        from absorbed_mla.kernels.invariant.row_topk import row_topk

        return row_topk(x, k, largest)
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k).clone(), indices.narrow(dim, 0, k).clone()


def is_of_short_rows(x: Tensor, k: int, dim: int) -> bool:
    """Whether a kernel finds them in one launch, where the sort and the copies take several."""
    return (
        x.dtype in _DTYPES
        and dim in (-1, x.ndim - 1)
        and x.shape[-1] <= MOST_COLUMNS
        and 0 < k <= min(x.shape[-1], MOST_FOUND)
        and x.numel() > 0
    )
