"""The two places in an MLA layer where tensor-parallel ranks exchange tokens and gradients.

After :func:`leave_column_parallel` a tensor has every feature of this rank's tokens (of all tokens
without sequence parallelism), and its gradient is complete. After :func:`enter_head_parallel` it
has every token, and a rank computes the gradient of its own heads only, so backward must sum over
ranks. A mistake in either leaves the outputs right and makes gradients wrong.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import (
    all_to_all_hp2sp,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor


def leave_column_parallel(
    x: Tensor, width: int, tp_group: torch.distributed.ProcessGroup, sequence_parallel: bool
) -> Tensor:
    """Give every rank all features of a down-projection's output.

    Args:
        x: [S, B, width / tp] from a column-parallel layer, or already [S or S/tp, B, width].
        width: Number of features of the whole projection.
        tp_group: Tensor-parallel group.
        sequence_parallel: Whether a rank gets its own tokens only.

    Returns:
        [S/tp, B, width] under sequence parallelism, else [S, B, width].
    """
    if x.shape[-1] == width:
        return x
    if not sequence_parallel:
        return gather_from_tensor_model_parallel_region(x, group=tp_group)
    # One all-to-all, instead of gathering all features of all tokens and dropping most tokens.
    local = all_to_all_hp2sp(x.contiguous(), group=tp_group)
    return local.view(-1, x.shape[1], width)


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
    if sequence_parallel:
        return gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=True, group=tp_group
        )
    return copy_to_tensor_model_parallel_region(x, group=tp_group)
