"""Weight, gradient and optimizer state as Muon steps on them; states joined and split by group."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from absorbed_mla.muon.orthogonalization_groups import OrthogonalizationGroup


@dataclass(frozen=True)
class MomentumView:
    """A weight of this rank, or what another rank has sent of one of its own.

    Attributes:
        value: [rows, ...]; this rank's is the optimizer's parameter, and is written.
        grad: Of the same shape.
        state: By name, scalars and tensors [rows, ...]; this rank's is the optimizer's.
        is_own: Whether it is this rank's.
    """

    value: Tensor
    grad: Tensor
    state: dict[str, Any]
    is_own: bool = True

    @classmethod
    def of(cls, optimizer: Optimizer, weight: Tensor) -> MomentumView:
        """A weight of this rank; without a gradient it has one of zeros."""
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        return cls(weight.detach(), grad, optimizer.state[weight])


def join_states(
    entry: OrthogonalizationGroup, rows: Sequence[MomentumView], count: int
) -> list[dict[str, Any]]:
    """The states of ``count`` matrices; empty before the first step."""
    joined: list[dict[str, Any]] = [{} for _ in range(count)]
    for name in rows[0].state:
        values = [part.state[name] for part in rows]
        if is_scalar(values[0]):
            made = [_copy(values[0]) for _ in joined]
        else:
            made = entry.join(values)
        for state, value in zip(joined, made):
            state[name] = value
    return joined


def store_states(
    entry: OrthogonalizationGroup, states: Sequence[dict], height: int, rows: Sequence[MomentumView]
) -> None:
    """The inverse of :func:`join_states`, of matrices of this height.

    Raises:
        ValueError: If a state is neither a scalar nor has the rows of the matrix.
    """
    for name, value in states[0].items():
        if is_scalar(value):
            parts = [value for _ in rows]
        elif isinstance(value, Tensor) and value.shape[0] == height:
            parts = entry.split([state[name] for state in states])
        else:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"muon_kv_up needs an optimizer whose states are scalars or have the {height} rows "
                f"of the matrix, got {got} for {name!r}; use muon_kv_up='split'"
            )
        for own, part in zip(rows, parts):
            if own.is_own and name in own.state and isinstance(part, Tensor):
                own.state[name].copy_(part)
            elif own.is_own:
                own.state[name] = _copy(part)


def is_scalar(value: object) -> bool:
    """Whether a state counts something, as against a tensor of the weight's rows."""
    return isinstance(value, numbers.Number) or (isinstance(value, Tensor) and value.ndim == 0)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
