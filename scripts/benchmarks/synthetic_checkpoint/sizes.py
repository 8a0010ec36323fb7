"""How many bytes a checkpoint has, and which one has about a given number."""

from __future__ import annotations

import dataclasses
import math
import re

from benchmarks.synthetic_checkpoint.models import (
    MODELS,
    SCALED,
    Choice,
    Stored,
    model_config,
    stored_tensors,
)

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# Of a value by the role of its tensor; all others are bfloat16.
ITEM_BYTES = {"fp8": 1, "scale": 4, "bias": 4}
# Sizes that are this close to the one asked for are equally good.
TOLERANCE = 0.03
# How much larger than asked for the smallest model of real widths may be.
EXCESS = 1.15


def parse_size(text: str) -> int:
    """Bytes of ``"20GB"``, ``"500 MB"`` or ``"1000000"``; units are decimal."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B|)", text.strip(), re.IGNORECASE)
    if not match or not float(match[1]):
        raise ValueError(f"a size is a number above 0 with KB, MB, GB or TB; got {text!r}")
    return round(float(match[1]) * UNITS[match[2].upper()])


def stored_bytes(tensor: Stored) -> int:
    """Bytes of one tensor's values."""
    return math.prod(tensor.shape) * ITEM_BYTES.get(tensor.role, 2)


def total_bytes(config: dict) -> int:
    """Bytes of all values."""
    return sum(stored_bytes(tensor) for tensor in stored_tensors(config))


def fit_size(choice: Choice, target: int) -> Choice:
    """Choose layers, experts and, if real widths are too large for it, the scale.

    Layers and experts grow together, so that neither stay few. The size misses the target where it
    is beyond the real model's.
    """
    scale = choice.scale_down
    limit = math.gcd(*(MODELS[choice.model][key] or 0 for key in SCALED))
    while _size(choice, scale, 1, 2) > EXCESS * target and limit % (2 * scale) == 0:
        scale *= 2
    # The size is base + MoE layers * (layer + experts * expert), MTP among the layers.
    least, mtp = _size(choice, scale, 1, 2), int(choice.mtp)
    expert = (_size(choice, scale, 1, 4) - least) // (2 * (1 + mtp))
    layer = _size(choice, scale, 2, 2) - least - 2 * expert
    base = least - (1 + mtp) * (layer + 2 * expert)
    real = MODELS[choice.model]
    candidates = [
        (abs(base + (moe + mtp) * (layer + experts * expert) - target), moe, experts)
        for moe in range(1, max(2, real["num_hidden_layers"] - choice.dense_layers + 1))
        for experts in range(2, real["n_routed_experts"] + 1, 2)
    ]
    nearest = min(candidates)
    close = [c for c in candidates if c[0] <= TOLERANCE * target] or [nearest]
    _, moe, experts = max(close, key=lambda c: (min(c[1:]), -c[0]))
    return _counted(choice, scale, moe, experts)


def _size(choice: Choice, scale: int, moe_layers: int, experts: int) -> int:
    return total_bytes(model_config(_counted(choice, scale, moe_layers, experts)))


def _counted(choice: Choice, scale: int, moe_layers: int, experts: int) -> Choice:
    layers = choice.dense_layers + moe_layers
    return dataclasses.replace(choice, layers=layers, experts=experts, scale_down=scale)
