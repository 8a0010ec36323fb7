"""Gradients that backward sums over ranks, in place of Megatron after it, and their norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from absorbed_mla.batch_invariant import parts

# Marks of Megatron's: a gradient that is to be summed over ranks, or averaged.
_MARKS = ("sequence_parallel", "average_gradients_across_tp_domain")
# Bits of a square in each of several sums of 64-bit integers: 2**41 squares do not overflow one.
_BITS, _SUMS = 22, 3
# Elements that are squared at a time.
_CHUNK = 2**22


def require_complete_gradients(model: Iterable[nn.Module], config: Any, tp_group=None) -> None:
    """In place of the sums of ``finalize_model_grads``: there is nothing left to sum.

    Megatron adds up the gradients of a step before it sums over ranks, so that the sum would depend
    on their number.

    Raises:
        ValueError: If a parameter, which is not of Megatron's GPT models, is left.
    """
    if (tp_group or parts.tensor_parallel_group()).size() == 1:
        return
    for name, parameter in (pair for chunk in model for pair in chunk.named_parameters()):
        marked = any(getattr(parameter, mark, False) for mark in _MARKS)
        if parameter.requires_grad and marked and not parts.is_complete(parameter):
            raise ValueError(
                f"{parts.OPTION} does not cover {name}, whose gradient is to be summed over "
                "tensor-parallel ranks"
            )


def exact_grad_norm(
    megatrons: Callable[..., Any],
    grads_for_norm: Tensor | Sequence[Tensor],
    norm_type: float = 2,
    grad_stats_parallel_group: dist.ProcessGroup | None = None,
) -> Any:
    """The norm of the gradients of all ranks, the same bits however ranks divide them.

    In place of ``get_grad_norm_fp32``, which adds up squares in the order of a rank's gradients,
    then those of ranks. Here squares are cut into integers, in units of the largest square; sums
    of these are exact in any order.

    Args:
        megatrons: Megatron's own function, for other norms than the Euclidean and DTensors.
        grads_for_norm, norm_type, grad_stats_parallel_group: As there.
    """
    grads = [grads_for_norm] if isinstance(grads_for_norm, Tensor) else [*grads_for_norm]
    if norm_type != 2 or any(isinstance(one, DTensor) for one in grads):
        return megatrons(grads_for_norm, norm_type, grad_stats_parallel_group)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    none = torch.zeros((), dtype=torch.float64, device=device)
    largest = torch.stack([none, *(x.abs().max().double() for x in grads if x.numel())]).max()
    # A maximum over ranks may pass over NaN.
    largest = largest.nan_to_num(nan=math.inf, posinf=math.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX, grad_stats_parallel_group)
    if not 0 < largest < math.inf:
        return largest.item()
    _, exponent = math.frexp(largest.item())
    sums = torch.zeros(_SUMS, dtype=torch.int64, device=device)
    for piece in (piece for one in grads for piece in one.detach().flatten().split(_CHUNK)):
        rest = piece.double().mul_(2.0**-exponent).square_()
        for number in range(_SUMS):
            rest *= 2**_BITS
            whole = rest.floor()
            sums[number] += whole.long().sum()
            rest -= whole
    dist.all_reduce(sums, group=grad_stats_parallel_group)
    total = 0
    for one in sums.tolist():
        total = (total << _BITS) + one
    return math.ldexp(math.sqrt(total / 2 ** (_BITS * _SUMS)), exponent)
