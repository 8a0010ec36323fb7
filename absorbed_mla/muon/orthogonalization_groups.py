"""Orthogonalisation groups: matrices that Muon steps on in place of the weights in them.

An attribute of K and V up-projection weights says what is one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
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


class Combined:
    """All heads' [k | v] rows as one matrix, the rows of standard MLA's linear_kv_up_proj."""

    # Sharded as the weights are.
    attributes: ClassVar[dict[str, Any]] = {}

    def __init__(self, weights: Sequence[nn.Parameter], head_dims: tuple[int, int]) -> None:
        self.weights, self.head_dims = weights, head_dims

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The matrix of the rows of both weights, [heads * (k + v), ...]."""
        per_head = [part.unflatten(0, (-1, d)) for part, d in zip(parts, self.head_dims)]
        return [torch.cat(per_head, dim=1).flatten(0, 1)]

    def split(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`join`."""
        per_head = matrices[0].unflatten(0, (-1, sum(self.head_dims))).split(self.head_dims, dim=1)
        return [part.flatten(0, 1) for part in per_head]


class PerHead:
    """Every head's rows of one weight as a matrix of its own."""

    # Whole on its tensor-parallel rank.
    attributes: ClassVar[dict[str, Any]] = {"partition_dim": -1, "tensor_model_parallel": False}

    def __init__(self, weight: nn.Parameter, head_dim: int) -> None:
        self.weights, self.head_dim = [weight], head_dim

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The heads' rows, [head_dim, ...] each."""
        return list(parts[0].unflatten(0, (-1, self.head_dim)).unbind())

    def split(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`join`."""
        return [torch.cat(list(matrices))]


OrthogonalizationGroup = Combined | PerHead


def orthogonalization_groups(
    layer: KVUp, weights: dict[int, nn.Parameter]
) -> list[OrthogonalizationGroup]:
    """What one layer's weights, by part, are stepped on as; empty where each is its own matrix.

    Raises:
        ValueError: If a weight is missing that is to be combined.
    """
    if layer.update == "split":
        return []
    if layer.update == "per_head":
        return [PerHead(weight, layer.head_dims[part]) for part, weight in weights.items()]
    if len(weights) != 2:
        raise not_together()
    return [Combined([weights[0], weights[1]], layer.head_dims)]


def not_together() -> ValueError:
    """What is raised if an optimizer cannot combine two weights."""
    return ValueError(
        "muon_kv_up='combined' needs linear_k_up_proj.weight and linear_v_up_proj.weight in one "
        "parameter group of one optimizer, got one without the other (is one frozen, or has it "
        "other options?); use muon_kv_up='split' or 'per_head'"
    )
