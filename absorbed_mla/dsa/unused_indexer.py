"""Zero gradients for the parameters of an indexer without a loss in a training of Megatron's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def with_zero_gradients(output: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """``output``, whose backward gives these parameters a gradient of 0.

    Megatron's DistributedDataParallel with ``overlap_grad_reduce`` starts to reduce a bucket when
    every parameter in it has a gradient, and from the second step on counts on those of the first.
    Parameters that it does not hold keep ``grad`` None.
    """
    held = [p for p in parameters if p.requires_grad and hasattr(p, "main_grad")]
    return _ZeroGradients.apply(output, *held) if held and torch.is_grad_enabled() else output


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, *parameters):
        ctx.kinds = [(p.shape, p.dtype, p.device) for p in parameters]
        return output

    @staticmethod
    def backward(ctx, grad):
        zeros = (torch.zeros(s, dtype=dtype, device=device) for s, dtype, device in ctx.kinds)
        return grad, *zeros
