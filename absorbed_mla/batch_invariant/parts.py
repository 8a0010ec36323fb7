"""Sums that are the same at every tensor-parallel size: of a fixed number of parts, by one tree.

What ranks sum up (the summands of a row-parallel product, the heads, the vocabulary, the tokens of
duplicated parameters) is cut into ``tensor_parallel_parts`` parts, whatever the size. A part is
summed by itself, and parts are added in fp32 (fp64) by a binary tree. A rank has parts that are
neighbours, a subtree, and :func:`collectives.sum_over_ranks` adds what ranks have by the rest of
the tree. Source of the idea: TBIK, arXiv:2511.17826.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from absorbed_mla.batch_invariant import products
from absorbed_mla.batch_invariant.tree import tree_sum

OPTION = "tensor_parallel_parts"
# Of a parameter whose gradient is the sum over ranks when backward ends.
_COMPLETE = "absorbed_mla_gradient_is_complete"
T = TypeVar("T")


class _Fixed:
    """What the mode fixes; read before every sum, by an attribute, which costs nothing.

    Attributes:
        count: The number of parts, of all ranks together; None where it is not fixed.
    """

    count: int | None = None


fixed = _Fixed()


def set_count(count: int | None) -> None:
    """Set the number of parts of this process.

    Args:
        count: A power of 2; None: sums are left as ranks divide them.

    Raises:
        ValueError: For other numbers.
    """
    if count is not None and (count < 1 or count & (count - 1)):
        raise ValueError(f"{OPTION} must be a power of 2 or None, got {count}")
    fixed.count = count


def own(group: dist.ProcessGroup | None = None) -> int:
    """How many parts a rank has.

    Args:
        group: The ranks that share them; None: the tensor-parallel ones.

    Raises:
        ValueError: If the number of ranks does not divide that of parts.
    """
    ranks = (group or tensor_parallel_group()).size()
    assert fixed.count is not None, "called where it is fixed"
    if fixed.count % ranks:
        raise ValueError(
            f"{OPTION}={fixed.count} must be a multiple of the {ranks} ranks that share it"
        )
    return fixed.count // ranks


def tensor_parallel_group() -> dist.ProcessGroup:
    """The ranks that share layers."""
    return parallel_state.get_tensor_model_parallel_group()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts are added."""
    return torch.promote_types(dtype, torch.float32)


def split_size(size: int, number: int | None = None) -> int:
    """Length of equal slices of what a rank has.

    Args:
        size: Heads, channels or summands of the rank.
        number: Of slices; None: of this rank's parts.

    Raises:
        ValueError: If there are no equal ones.
    """
    number = number or own()
    if size % number:
        raise ValueError(
            f"{OPTION}={fixed.count} must divide heads, channels and vocabulary; a rank's {size} "
            f"of them cannot be cut into {number}"
        )
    return size // number


def split(x: Tensor, number: int, dim: int) -> tuple[Tensor, ...]:
    """Equal slices of ``x``; see :func:`split_size`."""
    return x.split(split_size(x.shape[dim], number), dim)


def by_parts(function: Callable[..., T], dims: Sequence[int], *tensors: Tensor) -> list[T]:
    """``function`` of this rank's parts of tensors, such as groups of heads, one after the other.

    Shapes are then the same at every tensor-parallel size, so that no kernel is chosen by it.

    Args:
        function: Called with a slice of each tensor.
        dims: Of each tensor, the dim that is cut.
        tensors: This rank's share.

    Returns:
        What the calls returned.
    """
    slices = [split(x, own(), dim) for x, dim in zip(tensors, dims)]
    return [function(*some) for some in zip(*slices)]


def summed_product(
    left: Tensor, right: Tensor, number: int, stride: int = 1, dtype: torch.dtype | None = None
) -> Tensor:
    """The sum of ``number`` parts of a product of matrices.

    Args:
        left: [rows, summands].
        right: [summands, columns].
        number: Of parts.
        stride: Pieces that make up a part; the first piece of all parts comes first, as a rank has
            its gates before its up-projections.
        dtype: Of the result, rounded once; None: fp32 (fp64), in which parts are added.
    """
    leaves, dtype = number * stride, dtype or wide(left.dtype)
    split_size(left.shape[1], leaves)
    found = products.by_tree(left, right, leaves, stride, dtype)
    if found is not None:
        return found
    slices = zip(split(left, leaves, 1), split(right, leaves, 0))
    pieces = [products.of_part(x, y, wide(left.dtype)) for x, y in slices]
    total = tree_sum([tree_sum(pieces[part::number]) for part in range(number)])
    return total.to(dtype)


def side_by_side(left: Tensor, right: Tensor, number: int) -> Tensor:
    """A product whose columns have the same bits whatever columns are beside them.

    Args:
        left: [rows, summands].
        right: [summands, columns].
        number: Of equal slices of the columns, which are the same at every tensor-parallel size.
    """
    if right.is_cuda:
        return products.of_part(left, right, left.dtype)
    # Libraries for CPUs choose a kernel by the number of columns.
    slices = split(right, number, 1)
    return torch.cat([products.of_part(left, part, left.dtype) for part in slices], dim=1)


def token_group(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """The ranks that have tokens of their own for a duplicated parameter; None: each has all.

    Its gradient will be complete on every rank, so Megatron is not to sum it once more.
    """
    setattr(parameter, _COMPLETE, True)
    shared = getattr(parameter, "sequence_parallel", False)
    group = tensor_parallel_group()
    return group if shared and group.size() > 1 else None


def is_complete(parameter: nn.Parameter) -> bool:
    """Whether a parameter's gradient needs no sum over tensor-parallel ranks."""
    return getattr(parameter, _COMPLETE, False)


def token_slices(tokens: int, group: dist.ProcessGroup | None) -> list[slice]:
    """This rank's parts of the tokens, which need not divide by their number.

    Args:
        tokens: Of this rank.
        group: From :func:`token_group`.
    """
    number = fixed.count if group is None else own(group)
    assert number is not None
    ends = [part * tokens // number for part in range(number + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]
