"""Global parameter names: what this rank's weights are called in the whole model.

Pipeline stages number their layers, and experts' ranks their experts, from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from checkpoint_conversion.formats.legacy import whole_name

T = TypeVar("T")


def global_parameter_names(model: GPTModel, weights: Mapping[str, T]) -> dict[str, T]:
    """Weights of this rank's part of a model, under their names in the whole model.

    Args:
        model: This rank's part: a pipeline stage, or a virtual one.
        weights: By name in ``model``.
    """
    first_layer = min((layer.layer_number for layer in model.decoder.layers), default=1) - 1
    experts = (model.config.num_moe_experts or 0) // (
        parallel_state.get_expert_model_parallel_world_size()
    )
    first_expert = experts * parallel_state.get_expert_model_parallel_rank()
    return {whole_name(name, first_layer, first_expert): one for name, one in weights.items()}
