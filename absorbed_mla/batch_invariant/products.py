"""Matrix products on GPUs, in place of PyTorch's ``mm`` and ``addmm``.

Megatron's stand-ins for them (0.19.2) copy weights that are stored transposed, have one tile for
any number of rows, and refuse the factors of ``addmm``.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def mm(left: Tensor, right: Tensor) -> Tensor:
    """``left`` [rows, summands] times ``right`` [summands, columns]."""
    if not _has_kernel(left, right):
        # The ``out`` variant is not replaced; it raises what PyTorch raises, too.
        return torch.mm(left, right, out=left.new_empty(0))
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product

    return matrix_product(left, right)


def addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta=1, alpha=1) -> Tensor:
    """``beta * bias + alpha * left @ right``; other factors than 1 round once more."""
    if not _has_kernel(left, right) or bias.dtype != left.dtype:
        return torch.addmm(bias, left, right, beta=beta, alpha=alpha, out=left.new_empty(0))
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product

    if alpha == beta == 1:
        return matrix_product(left, right, bias)
    product = matrix_product(left, right) * alpha
    return product if beta == 0 else torch.add(product, bias, alpha=beta)


def _has_kernel(left: Tensor, right: Tensor) -> bool:
    """Whether the kernel takes them: not fp64, integers, or what cannot be multiplied."""
    return (
        left.dtype == right.dtype
        and left.dtype in DTYPES
        and left.ndim == right.ndim == 2
        and left.shape[1] == right.shape[0]
    )
