"""Gradients that backward sums over tensor-parallel ranks, in place of Megatron after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from absorbed_mla.batch_invariant import parts

# Marks of Megatron's: a gradient that is to be summed over ranks, or averaged.
_MARKS = ("sequence_parallel", "average_gradients_across_tp_domain")


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
