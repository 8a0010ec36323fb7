"""Megatron's process-wide state of the balancing losses of experts."""

from __future__ import annotations

from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


def forget_balancing_losses() -> None:
    """Reset the state to that of a new process.

    The metrics have the layers of the first model of the process. The loss scale has the shape of
    its first use: one element in Megatron's schedules, a scalar in a plain backward.
    """
    destroy_moe_metrics_tracker()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
