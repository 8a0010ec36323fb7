"""Megatron's process-wide state of losses beside the main one."""

import torch
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
)


def forget_auxiliary_losses() -> None:
    """Reset the state to that of a new process.

    Sums to be logged have the layers of the first model of the process. The scale of a loss has
    the shape of its first use: one element in Megatron's schedules, a scalar in a plain backward.
    """
    destroy_moe_metrics_tracker()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    MTPLossLoggingHelper.tracker.clear()
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    DSAIndexerLossLoggingHelper.tracker.clear()
    DSAIndexerLossAutoScaler.main_loss_backward_scale = None
