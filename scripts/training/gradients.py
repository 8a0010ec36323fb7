"""Sums over parameters that count every parameter of the whole model once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import nn


def sum_over_model_parallel(
    params: Iterable[nn.Parameter], value: Callable[[nn.Parameter], float | torch.Tensor]
) -> float:
    """Sum of ``value`` over the parameters of all model-parallel ranks.

    Sharded parameters are summed over their shards, duplicated ones counted on one rank. Experts
    have groups of their own.
    """
    params = list(params)
    device = params[0].device
    expert_tp = parallel_state.get_expert_tensor_parallel_group()
    totals = {True: torch.zeros((), device=device), False: torch.zeros((), device=device)}
    totals = {kind: total.double() for kind, total in totals.items()}
    for param in params:
        if param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(
            param, expert_tp_group=expert_tp
        ):
            # Megatron marks experts, which data parallelism reduces over fewer ranks.
            is_expert = not getattr(param, "allreduce", True)
            totals[is_expert] += value(param)
    dist.all_reduce(totals[False], group=parallel_state.get_model_parallel_group())
    dist.all_reduce(
        totals[True], group=parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    )
    return (totals[False] + totals[True]).item()


def gradient_norm(params: Iterable[nn.Parameter]) -> float:
    """Euclidean norm of the whole model's ``main_grad``."""
    return sum_over_model_parallel(params, lambda p: p.main_grad.double().square().sum()) ** 0.5
