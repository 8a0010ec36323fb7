"""Aux-loss scaler of the indexer: hands its loss, or zero gradients, to Megatron's backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)
from torch import Tensor, nn


def report_loss(
    output: Tensor,
    loss: Tensor,
    *,
    layer_number: int,
    num_layers: int,
    cp_group: dist.ProcessGroup | None,
) -> Tensor:
    """Let ``output`` carry the loss: its backward is also that of the loss.

    Megatron's schedules multiply the loss as they do the model's own
    (``DSAIndexerLossAutoScaler.set_loss_scale``): by the loss scale, and for mean losses by the
    context-parallel size over the number of microbatches. ``loss`` must therefore be this rank's
    share of the whole: the sum over its queries, for a mean over the queries of all
    context-parallel ranks.

    Args:
        output: Of the attention.
        loss: From ``indexer_loss``.
        layer_number: Counted from 1, layers of multi-token prediction behind the decoder's.
        num_layers: Of the whole model, with those.
        cp_group: Context-parallel ranks, over which Megatron's log sums the shares.

    Returns:
        ``output``.
    """
    DSAIndexerLossLoggingHelper.save_loss_to_tracker(
        loss=loss.detach(),
        layer_number=layer_number,
        num_layers=num_layers,
        reduce_group=cp_group if cp_group is not None and cp_group.size() > 1 else None,
    )
    return DSAIndexerLossAutoScaler.apply(output, loss)


def with_zero_gradients(output: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """``output``, whose backward gives the parameters of an indexer without a loss a gradient of 0.

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
