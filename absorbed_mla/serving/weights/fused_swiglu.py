"""Fused SwiGLU of MLPs: one kernel where Megatron's own takes three."""

from __future__ import annotations

import copy
import logging

import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from absorbed_mla.log_once import log_once
from absorbed_mla.serving.megatron_engine.names import ACTIVATION, FUSED_SWIGLU
from absorbed_mla.serving.megatron_engine.names import MLP as MLP_PATH

logger = logging.getLogger(__name__)


class SwiGLU(nn.Module):
    """``silu(gate) * up``, without gradients on a GPU.

    Args:
        rounds_each_step: Have the bits of Megatron's own on a GPU, too.
    """

    def __init__(self, *, rounds_each_step: bool) -> None:
        super().__init__()
        self.rounds_each_step = rounds_each_step

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Of [..., 2 F], the gate in the first half: [..., F]."""
        if gate_and_up.is_cuda:
            # Imported here: machines without a GPU may have no Triton.
            from absorbed_mla.kernels.moe.swiglu import gated

            return gated(gate_and_up, rounds_each_step=self.rounds_each_step)
        gate, up = gate_and_up.chunk(2, dim=-1)
        # Megatron's offset of zero, which makes 0 of -0.
        return F.silu(gate) * (up + 0.0)


def fuse_swiglu(model: nn.Module, *, rounds_each_step: bool = False) -> None:
    """Let all MLPs of a model that only generates compute SwiGLU so, shared experts' included.

    Args:
        model: Any.
        rounds_each_step: See :class:`SwiGLU`; for parity mode.
    """
    for module in [*model.modules()]:
        if not isinstance(module, MLP) or not _is_plain_swiglu(module.config):
            continue
        if missing := FUSED_SWIGLU.missing({MLP_PATH: module}):
            log_once(logger, "MLPs compute SwiGLU in three kernels", missing)
        else:
            # Megatron's option for an activation that takes gate and up together.
            module.config = copy.copy(module.config)
            module.config.use_te_activation_func = True
            ACTIVATION.replace(module, SwiGLU(rounds_each_step=rounds_each_step))


def _is_plain_swiglu(config) -> bool:
    changed = (
        config.add_bias_linear,
        config.bias_activation_fusion,
        config.use_te_activation_func,
        config.activation_func_clamp_value is not None,
        config.glu_linear_offset,
    )
    return config.activation_func is F.silu and config.gated_linear_unit and not any(changed)
