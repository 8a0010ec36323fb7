"""The two borders of an MLA layer at which tensor-parallel ranks exchange tokens and gradients.

Between the down-projections and the first border a tensor holds this rank's tokens (all of them
without sequence parallelism) and every feature; its gradient is complete. Behind the second border
it holds every token, and each rank adds the gradient of its own heads only, so backward must sum
over ranks. Getting either wrong leaves the outputs right and the gradients wrong.
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
    """Undo the sharding of a down-projection's output over its features.

    Args:
        x: [S, B, width / tp] from a column-parallel layer, or already [S or S/tp, B, width].
        width: Number of features of the whole projection.
        tp_group: Tensor-parallel group.
        sequence_parallel: Whether to return this rank's tokens only.

    Returns:
        [S/tp, B, width] under sequence parallelism, else [S, B, width].
    """
    if x.shape[-1] == width:
        return x
    if not sequence_parallel:
        return gather_from_tensor_model_parallel_region(x, group=tp_group)
    # One exchange instead of gathering the features and throwing most tokens away.
    local = all_to_all_hp2sp(x.contiguous(), group=tp_group)
    return local.view(-1, x.shape[1], width)


def enter_head_parallel(
    x: Tensor, tp_group: torch.distributed.ProcessGroup, sequence_parallel: bool
) -> Tensor:
    """Give every rank all tokens of ``x`` [S or S/tp, B, D]; backward sums over the ranks' heads.

    Returns:
        [S, B, D].
    """
    if tp_group.size() == 1:
        return x
    if sequence_parallel:
        return gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=True, group=tp_group
        )
    return copy_to_tensor_model_parallel_region(x, group=tp_group)
