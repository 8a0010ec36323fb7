"""Aux-loss scaler of the indexer: hands its loss to Megatron's backward and to its log."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)
from torch import Tensor


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
