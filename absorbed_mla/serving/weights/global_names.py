"""Global parameter names: what this rank's weights are called in the whole model.

Pipeline stages number their layers, and experts' ranks their experts, from 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_EXPERT = re.compile(r"(.+\.local_experts\.)(\d+)(\..+)")

T = TypeVar("T")


def global_parameter_names(model: GPTModel, weights: Mapping[str, T]) -> dict[str, T]:
    """Weights of this rank's part of a model, under their names in the whole model.

    Args:
        model: This rank's part: a pipeline stage, or a virtual one.
        weights: By name in ``model``.
    """
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    experts = (model.config.num_moe_experts or 0) // (
        parallel_state.get_expert_model_parallel_world_size()
    )
    first = experts * parallel_state.get_expert_model_parallel_rank()
    return {_whole_name(name, layers, first): weight for name, weight in weights.items()}


def _whole_name(name: str, layers: list[int], first_expert: int) -> str:
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        name = f"{layer[1]}{layers[int(layer[2])]}{layer[3]}"
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        name = f"{expert[1]}{first_expert + int(expert[2])}{expert[3]}"
    return name
