"""Matrix products on GPUs, in place of PyTorch's ``mm`` and ``addmm``.

Megatron's stand-ins for them (0.19.2) copy weights that are stored transposed, have one tile for
any number of rows, and refuse the factors of ``addmm``.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CACHE_LINE = 64


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


def of_part(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left`` times ``right`` in parity mode, by an order of sums that their height settles.

    Args:
        left: [rows, summands].
        right: [summands, columns].
        dtype: Of the result, which is rounded once.
    """
    if left.is_cuda and _has_kernel(left, right):
        from absorbed_mla.kernels.invariant.matrix_product import matrix_product
        from absorbed_mla.kernels.invariant.tiles import PART

        return matrix_product(left, right, dtype=dtype, part=PART)
    # On a CPU how a product is summed may depend on where and how the matrix lies in memory.
    right = right.to(dtype)
    turned = right.stride(0) == 1
    matrix = (right.T if turned else right).contiguous()
    if matrix.data_ptr() % _CACHE_LINE:
        matrix = matrix.clone()
    return torch.mm(left.to(dtype), matrix.T if turned else matrix)


def by_tree(
    left: Tensor, right: Tensor, leaves: int, runs: int, dtype: torch.dtype
) -> Tensor | None:
    """``left`` times ``right``, summed by a tree in one kernel; None where there is none.

    Args:
        left: [rows, summands].
        right: [summands, columns].
        leaves: See ``kernels/invariant/tree_product.py``, like ``runs``.
        dtype: Of the result, which is rounded once.
    """
    if not left.is_cuda or not _has_kernel(left, right):
        return None
    from absorbed_mla.kernels.invariant.tree_product import tree_product

    return tree_product(left, right, leaves, runs, dtype)


def _has_kernel(left: Tensor, right: Tensor) -> bool:
    """Whether the kernel takes them: not fp64, integers, or what cannot be multiplied."""
    return (
        left.dtype == right.dtype
        and left.dtype in DTYPES
        and left.ndim == right.ndim == 2
        and left.shape[1] == right.shape[0]
    )
