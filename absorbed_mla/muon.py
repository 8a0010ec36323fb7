"""What Muon orthogonalises as one matrix: the K and V up-projections combined, apart, or by head.

Muon replaces a matrix's momentum by the nearest orthogonal matrix, so that its update depends on
which rows are one matrix. Standard MLA has K and V up-projections in one ``linear_kv_up_proj``;
here they are two parameters. The option ``muon_kv_up`` is kept as an attribute of both weights, and
an optimizer that follows it steps on the matrices that the option names instead of on the weights.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MARK = "muon_kv_up"
_FOLLOWS = "follows_muon_kv_up"
# Megatron's optimizers that orthogonalise, by their names in its registry.
_MEGATRON_NAMES = ("muon", "adaptive_muon")
# Attributes of a weight that a matrix made of it must not have.
_OF_THE_WEIGHT = (MARK, "main_grad", "main_param")


@dataclass(frozen=True, eq=False)
class KVUp:
    """One layer's choice.

    Attributes:
        update: Value of ``muon_kv_up``.
        head_dims: Rows per head of ``linear_k_up_proj`` and of ``linear_v_up_proj``.
    """

    update: str
    head_dims: tuple[int, int]


@dataclass(frozen=True)
class Mark:
    """Attribute of a weight: its layer's choice, and whether it is the K or the V up-projection."""

    layer: KVUp
    part: int


def mark_kv_up(w_uk: nn.Parameter, w_uv: nn.Parameter, layer: KVUp) -> None:
    """Mark one layer's weights [heads * head_dim, C], and have Megatron's Muon follow the marks."""
    for part, weight in enumerate((w_uk, w_uv)):
        setattr(weight, MARK, Mark(layer, part))
    if layer.update != "split":
        _follow_in_megatron()


def follow_kv_up_marks(optimizer: Optimizer) -> None:
    """Make an optimizer of PyTorch's kind step as the marks of its parameters say.

    Call it before anything replaces the optimizer's parameters. Megatron's Muon needs no call.

    Args:
        optimizer: It may be any that computes an update from one matrix and its gradient, and
            keeps states that are scalars or have the matrix's rows.

    Raises:
        ValueError: If it has no weight of an AbsorbedMLASelfAttention.
    """
    if not _marked(optimizer):
        raise ValueError(
            "optimizer must have the linear_k_up_proj and linear_v_up_proj weights of an "
            "AbsorbedMLASelfAttention, got one without; call follow_kv_up_marks as soon as it is "
            "made of the model's parameters"
        )
    _follow(optimizer)


def _follow_in_megatron() -> None:
    """Let every Muon that Megatron makes from now on follow the marks."""
    from megatron.core.optimizer import emerging_optimizers

    for name in _MEGATRON_NAMES:
        entry = emerging_optimizers._EMERGING_OPTIMIZERS[name]
        if not hasattr(entry.optimizer_cls, _FOLLOWS):
            entry.optimizer_cls = _following(entry.optimizer_cls)


def _following(optimizer_class: type[Optimizer]) -> Callable[..., Optimizer]:
    @functools.wraps(optimizer_class, updated=())
    def build(*args, **kwargs) -> Optimizer:
        optimizer = optimizer_class(*args, **kwargs)
        _follow(optimizer)
        return optimizer

    setattr(build, _FOLLOWS, True)
    return build


def _follow(optimizer: Optimizer) -> None:
    """Replace the optimizer's step, unless nothing is to do or it was done before."""
    layers = [_matrices(weights) for weights in _marked(optimizer).values()]
    matrices = [entry for layer in layers for entry in layer]
    if not matrices or hasattr(optimizer.step, _FOLLOWS):
        return
    plain = optimizer.step

    @functools.wraps(plain)
    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        return _step(self, plain, matrices, closure)

    setattr(step, _FOLLOWS, True)
    # A bound method, because PyTorch's learning-rate schedulers unwrap it.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _marked(optimizer: Optimizer) -> dict[KVUp, dict[int, nn.Parameter]]:
    """The optimizer's marked weights by layer; K is 0 and V is 1."""
    found: dict[KVUp, dict[int, nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            mark = getattr(weight, MARK, None)
            if mark is not None:
                found.setdefault(mark.layer, {})[mark.part] = weight
    return found


class _Combined:
    """All heads' [k | v] rows as one matrix, the rows of standard MLA's linear_kv_up_proj."""

    own_attributes: ClassVar[dict[str, Any]] = {}

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


class _PerHead:
    """Every head's rows of one weight as a matrix of its own, whole on one tensor-parallel rank."""

    own_attributes: ClassVar[dict[str, Any]] = {"partition_dim": -1, "tensor_model_parallel": False}

    def __init__(self, weight: nn.Parameter, head_dim: int) -> None:
        self.weights, self.head_dim = [weight], head_dim

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The heads' rows, [head_dim, ...] each."""
        return list(parts[0].unflatten(0, (-1, self.head_dim)).unbind())

    def split(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`join`."""
        return [torch.cat(list(matrices))]


def _matrices(weights: dict[int, nn.Parameter]) -> list[_Combined | _PerHead]:
    """What one layer's weights are stepped on as; empty where they are their own matrices."""
    layer: KVUp = getattr(next(iter(weights.values())), MARK).layer
    if layer.update == "split":
        return []
    if layer.update == "per_head":
        return [_PerHead(weight, layer.head_dims[part]) for part, weight in weights.items()]
    if len(weights) != 2:
        raise _not_together()
    return [_Combined([weights[0], weights[1]], layer.head_dims)]


def _not_together() -> ValueError:
    return ValueError(
        "muon_kv_up='combined' needs linear_k_up_proj.weight and linear_v_up_proj.weight in one "
        "parameter group of one optimizer, got one without the other (frozen, given other "
        "options, or on another data-parallel rank, where Megatron's layer-wise distributed "
        "optimizer may put it); use muon_kv_up='split' or 'per_head'"
    )


def _step(
    optimizer: Optimizer, plain: Callable, matrices: Sequence, closure: Callable | None
) -> float | None:
    """One step: on the other parameters, then on each layer's matrices, one layer at a time."""
    # As they are before the step, which may count itself in them.
    groups = [dict(group) for group in optimizer.param_groups]
    present = [(entry, *found) for entry in matrices if (found := _find(entry, groups))]
    held = {id(weight) for _, weights, _ in present for weight in weights}
    with _params([[p for p in g["params"] if id(p) not in held] for g in groups], optimizer):
        result = plain() if closure is None else plain(closure)
    for entry, weights, group in present:
        if any(weight.grad is not None for weight in weights):
            _step_on_matrices(optimizer, plain, entry, weights, group)
    return result


def _find(entry: Any, groups: list[dict]) -> tuple[list[Tensor], dict] | None:
    """The weights as the optimizer has them, and their group; None if it has none of them."""
    where = {id(p): group for group in groups for p in group["params"]}
    # Megatron's fp32 copy of a parameter in bf16 takes its place.
    weights = [w if id(w) in where else getattr(w, "main_param", w) for w in entry.weights]
    first, *others = (where.get(id(weight)) for weight in weights)
    if any(other is not first for other in others):
        raise _not_together()
    return None if first is None else (weights, first)


@contextmanager
def _params(params: list[list[Tensor]], optimizer: Optimizer) -> Iterator[None]:
    """Other parameters in the optimizer's groups, inside the block."""
    groups = list(optimizer.param_groups)
    kept = [group["params"] for group in groups]
    for group, own in zip(groups, params):
        group["params"] = own
    try:
        yield
    finally:
        for group, own in zip(groups, kept):
            group["params"] = own


@torch.no_grad()
def _step_on_matrices(
    optimizer: Optimizer, plain: Callable, entry: Any, weights: list[Tensor], group: dict
) -> None:
    """Step on the matrices of some weights, and put values and states back into the weights."""
    matrices = [nn.Parameter(data) for data in entry.join([w.detach() for w in weights])]
    grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
    attributes = {k: v for k, v in vars(weights[0]).items() if k not in _OF_THE_WEIGHT}
    for matrix, grad in zip(matrices, entry.join(grads)):
        vars(matrix).update(attributes | entry.own_attributes)
        matrix.grad = grad
    for matrix, state in zip(matrices, _joined_states(optimizer, entry, weights, len(matrices))):
        if state:
            optimizer.state[matrix] = state
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": matrices}]
    try:
        plain()
    finally:
        optimizer.param_groups = groups
        states = [optimizer.state.pop(matrix, {}) for matrix in matrices]
    for weight, values in zip(weights, entry.split(matrices)):
        weight.copy_(values)
    _store_states(optimizer, entry, weights, states, matrices[0].shape[0])


def _joined_states(
    optimizer: Optimizer, entry: Any, weights: list[Tensor], count: int
) -> list[dict[str, Any]]:
    """The states of the matrices; empty before the first step."""
    first, *others = (optimizer.state.get(weight, {}) for weight in weights)
    joined: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in first.items():
        if _is_scalar(value):
            values = [value.clone() if isinstance(value, Tensor) else value for _ in joined]
        else:
            values = entry.join([value, *(other[name] for other in others)])
        for state, own in zip(joined, values):
            state[name] = own
    return joined


def _store_states(
    optimizer: Optimizer, entry: Any, weights: list[Tensor], states: list[dict], rows: int
) -> None:
    """The inverse of :func:`_joined_states`: every weight keeps the states of its rows."""
    for name, value in states[0].items():
        if _is_scalar(value):
            parts = [value] * len(weights)
        elif isinstance(value, Tensor) and value.shape[0] == rows:
            parts = entry.split([state[name] for state in states])
        else:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"muon_kv_up needs an optimizer whose states are scalars or have the {rows} rows "
                f"of the matrix, got {got} for {name!r}; use muon_kv_up='split'"
            )
        for weight, part in zip(weights, parts):
            own = optimizer.state[weight]
            if isinstance(part, Tensor) and name in own:
                own[name].copy_(part)
            else:
                own[name] = part.clone() if isinstance(part, Tensor) else part


def _is_scalar(value: object) -> bool:
    return isinstance(value, numbers.Number) or (isinstance(value, Tensor) and value.ndim == 0)
