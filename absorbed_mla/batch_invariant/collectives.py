"""Tensor-parallel sums by a tree over the ranks, whatever algorithm NCCL would take.

Ring algorithms start the sum of each chunk of the buffer at another rank. With more than two ranks
the result of a token would then depend on its place in the buffer.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from absorbed_mla.batch_invariant import megatron_operators
from absorbed_mla.batch_invariant.tree import tree_sum

# Two summands may be added in either order.
_COMMUTATIVE_RANKS = 2
# Larger tensors are summed a share by each rank, which takes two collectives and less memory.
_SHARED_ELEMENTS = 1 << 20


def reduce_by_tree(input_: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' tensors, on every rank; it may be ``input_`` itself."""
    ranks = group.size()
    if ranks <= _COMMUTATIVE_RANKS:
        return megatron_operators.megatrons(megatron_operators.megatron_reduce)(input_, group)
    flat = input_.reshape(-1)
    if flat.numel() >= _SHARED_ELEMENTS and flat.numel() % ranks == 0:
        total = input_.new_empty(input_.shape)
        share = reduce_scatter_by_tree(flat, group)
        dist.all_gather_into_tensor(total.view(-1), share, group=group)
        return total
    parts = input_.new_empty(ranks * flat.numel())
    dist.all_gather_into_tensor(parts, flat, group=group)
    return tree_sum(parts.view(ranks, *input_.shape).unbind())


def reduce_scatter_by_tree(
    input_: Tensor,
    group: dist.ProcessGroup,
    input_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """This rank's part, along the first dim, of the sum of all ranks' tensors.

    Args:
        input_: Of one shape on all ranks.
        group: The ranks.
        input_split_sizes: Lengths of the ranks' parts; None for equal ones.
        use_global_buffer: Part of Megatron's signature; used with one or two ranks only.
    """
    ranks = group.size()
    if ranks <= _COMMUTATIVE_RANKS:
        reduce_scatter = megatron_operators.megatrons(megatron_operators.megatron_reduce_scatter)
        return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
    sizes = input_split_sizes or [len(input_) // ranks] * ranks
    own = sizes[group.rank()]
    parts = input_.new_empty(ranks * own, *input_.shape[1:])
    dist.all_to_all_single(
        parts,
        input_.contiguous(),
        output_split_sizes=[own] * ranks,
        input_split_sizes=sizes,
        group=group,
    )
    return tree_sum(parts.view(ranks, own, *input_.shape[1:]).unbind())
