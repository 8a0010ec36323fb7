"""The attribute of K and V up-projection weights: what Muon orthogonalises as one matrix."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

ATTRIBUTE = "muon_kv_up"


@dataclass(frozen=True, eq=False)
class KVUp:
    """One layer's choice.

    Attributes:
        update: Value of ``muon_kv_up``; ``"auto"`` is combined.
        head_dims: Rows per head of ``linear_k_up_proj`` and of ``linear_v_up_proj``.
    """

    update: str
    head_dims: tuple[int, int]


@dataclass(frozen=True)
class KVUpPart:
    """A weight's layer, and whether it is its K (0) or its V (1) up-projection."""

    layer: KVUp
    part: int


def kv_up_weights(optimizer: Optimizer) -> dict[KVUp, dict[int, nn.Parameter]]:
    """The optimizer's marked weights by layer and part."""
    found: dict[KVUp, dict[int, nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            mark = getattr(weight, ATTRIBUTE, None)
            if mark is not None:
                found.setdefault(mark.layer, {})[mark.part] = weight
    return found
