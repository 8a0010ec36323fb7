"""The two places in an MLA layer where tensor-parallel ranks exchange tokens and gradients.

After :func:`leave_column_parallel` a tensor has every feature of this rank's tokens (of all tokens
without sequence parallelism), and its gradient is complete. After :func:`enter_head_parallel` it
has every token, and a rank computes the gradient of its own heads only, so backward must sum over
ranks. A mistake in either leaves the outputs right and makes gradients wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel.mappings import (
    all_to_all_hp2sp,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor

from absorbed_mla.batch_invariant import parts


def leave_column_parallel(
    x: Tensor,
    widths: Sequence[int],
    tp_group: torch.distributed.ProcessGroup,
    sequence_parallel: bool,
) -> tuple[Tensor, ...]:
    """Give every rank all features of a down-projection's output.

    Args:
        x: [S, B, width / tp] from a column-parallel layer, a part of each of ``widths``, or already
            [S or S/tp, B, width].
        widths: Numbers of features of what the whole layer computes; width is their sum.
        tp_group: Tensor-parallel group.
        sequence_parallel: Whether a rank gets its own tokens only.

    Returns:
        A tensor for each of ``widths``, perhaps a view: [S/tp, B, one of widths] under sequence
        parallelism, else [S, B, one of widths].
    """
    width = sum(widths)
    shards = width // x.shape[-1]
    if shards > 1 and not sequence_parallel:
        x = gather_from_tensor_model_parallel_region(x, group=tp_group)
    elif shards > 1:
        # One all-to-all, instead of gathering all features of all tokens and dropping most tokens.
        local = all_to_all_hp2sp(x.contiguous(), group=tp_group)
        x = local.view(-1, x.shape[1], width)
    if len(widths) == 1:
        return (x,)
    if shards == 1:
        return x.split(list(widths), dim=-1)
    # Every rank's part of the first, then of the second.
    parts = x.unflatten(-1, (shards, -1)).split([one // shards for one in widths], dim=-1)
    return tuple(part.flatten(-2) for part in parts)


def enter_head_parallel(
    x: Tensor, tp_group: torch.distributed.ProcessGroup, sequence_parallel: bool
) -> Tensor:
    """Give every rank all tokens; backward sums the gradients of all ranks' heads.

    Args:
        x: [S/tp, B, width] under sequence parallelism, else [S, B, width].
        tp_group: Tensor-parallel group.
        sequence_parallel: Whether ``x`` has this rank's tokens only.

    Returns:
        [S, B, width].
    """
    if tp_group.size() == 1:
        return x
    # With a fixed number of parts the core attention's backward sums over ranks, in fp32.
    summed = parts.fixed.count is not None
    if sequence_parallel:
        return gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=not summed, group=tp_group
        )
    return x if summed else copy_to_tensor_model_parallel_region(x, group=tp_group)
