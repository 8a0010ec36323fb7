"""An optimizer's step in which orthogonalisation groups take the place of some weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from absorbed_mla.muon.momentum_view import MomentumView, join_states, store_states
from absorbed_mla.muon.orthogonalization_groups import (
    ATTRIBUTE,
    Combined,
    OrthogonalizationGroup,
    not_together,
)
from absorbed_mla.muon.rank_pairs import RankPairs, data_parallel_group

# The weights of an entry, None for those that this rank's optimizer has not, and their group.
Found = tuple[list[Tensor | None], dict[str, Any]]
# Attributes of a weight that a matrix made of it must not have.
_OF_THE_WEIGHT = (ATTRIBUTE, "main_grad", "main_param")


class Step:
    """Steps on the other parameters, then on one layer's matrices after the other.

    One at a time, because a matrix of two weights is a copy of both.

    Args:
        plain: The optimizer's own step.
        entries: The matrices, and the model's weights that they are made of.
    """

    def __init__(self, plain: Callable, entries: Sequence[OrthogonalizationGroup]) -> None:
        self._plain, self._entries = plain, entries
        self._pairs: RankPairs | None = None

    def __call__(self, optimizer: Optimizer, closure: Callable | None) -> float | None:
        """The step.

        Raises:
            ValueError: If the optimizer lacks one of two weights to combine, or has a state that
                cannot be divided.
        """
        # As they are before the step, which may count itself in them.
        groups = [dict(group) for group in optimizer.param_groups]
        group_of = {id(p): group for group in groups for p in group["params"]}
        found = [_find(entry, group_of) for entry in self._entries]
        self._find_rank_pairs(optimizer, found)
        held = {id(weight) for weights, _ in found for weight in weights if weight is not None}
        with _only([[p for p in g["params"] if id(p) not in held] for g in groups], optimizer):
            result = self._plain() if closure is None else self._plain(closure)
        for number, (weights, group) in enumerate(found):
            own = [weight for weight in weights if weight is not None]
            # Whoever has one of two waits for the other's, whatever the gradients.
            shared = 0 < len(own) < len(weights)
            if shared or any(weight.grad is not None for weight in own):
                rows = self._rows(optimizer, number, found[number])
                attributes = {k: v for k, v in vars(own[0]).items() if k not in _OF_THE_WEIGHT}
                self._step_on_matrices(optimizer, self._entries[number], rows, attributes, group)
        return result

    def _find_rank_pairs(self, optimizer: Optimizer, found: list[Found]) -> None:
        """At the first step, in which all data-parallel ranks take part."""
        pairs = {
            number: [weight is not None for weight in weights]
            for number, (weights, _) in enumerate(found)
            if len(weights) == 2
        }
        group = data_parallel_group(optimizer)
        if group is None:
            if any(sum(present) == 1 for present in pairs.values()):
                raise not_together()
        elif self._pairs is None and pairs:
            device = self._entries[0].weights[0].device
            self._pairs = RankPairs(group, pairs, device)

    def _rows(self, optimizer: Optimizer, number: int, found: Found) -> list[MomentumView]:
        """All rows of an entry, some of them perhaps another rank's."""
        own = {part: weight for part, weight in enumerate(found[0]) if weight is not None}
        rows = [MomentumView.of(optimizer, weight) for weight in own.values()]
        entry = self._entries[number]
        if len(rows) < len(entry.weights) and isinstance(entry, Combined):
            assert self._pairs is not None
            return self._pairs.exchange(number, entry, next(iter(own)), rows[0])
        return rows

    @torch.no_grad()
    def _step_on_matrices(
        self,
        optimizer: Optimizer,
        entry: OrthogonalizationGroup,
        rows: list[MomentumView],
        attributes: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        """Step on the matrices of some rows, and put values and states back."""
        matrices = [nn.Parameter(value) for value in entry.join([part.value for part in rows])]
        states = join_states(entry, rows, len(matrices))
        grads = entry.join([part.grad for part in rows])
        for matrix, grad, state in zip(matrices, grads, states):
            vars(matrix).update(attributes | entry.attributes)
            matrix.grad = grad
            if state:
                optimizer.state[matrix] = state
        groups = optimizer.param_groups
        optimizer.param_groups = [{**group, "params": matrices}]
        try:
            self._plain()
        finally:
            optimizer.param_groups = groups
            states = [optimizer.state.pop(matrix, {}) for matrix in matrices]
        for part, value in zip(rows, entry.split(matrices)):
            if part.is_own:
                part.value.copy_(value)
        store_states(entry, states, matrices[0].shape[0], rows)


def _find(entry: OrthogonalizationGroup, group_of: dict[int, dict[str, Any]]) -> Found:
    weights: list[Tensor | None] = []
    for weight in entry.weights:
        # Megatron's fp32 copy of a parameter in bf16 takes its place.
        copies = [p for p in (weight, getattr(weight, "main_param", None)) if id(p) in group_of]
        weights.append(copies[0] if copies else None)
    own = [group_of[id(weight)] for weight in weights if weight is not None]
    if any(group is not own[0] for group in own):
        raise not_together()
    return weights, own[0] if own else {}


@contextmanager
def _only(params: list[list[Tensor]], optimizer: Optimizer) -> Iterator[None]:
    """These parameters in the optimizer's groups, inside the block."""
    groups = list(optimizer.param_groups)
    kept = [group["params"] for group in groups]
    for group, own in zip(groups, params):
        group["params"] = own
    try:
        yield
    finally:
        for group, own in zip(groups, kept):
            group["params"] = own
