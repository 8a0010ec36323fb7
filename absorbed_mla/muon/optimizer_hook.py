"""Optimizer hook of Muon: K and V up-projections are orthogonalised as the option says."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import MethodType

from torch import nn
from torch.optim import Optimizer

from absorbed_mla.log_once import log_once
from absorbed_mla.megatron_names import MUON_REGISTRY, OPTIMIZERS
from absorbed_mla.muon.orthogonalization_groups import (
    ATTRIBUTE,
    KVUp,
    KVUpPart,
    kv_up_weights,
    orthogonalization_groups,
)
from absorbed_mla.muon.step import Step

logger = logging.getLogger(__name__)
_FOLLOWS = "follows_muon_kv_up"
# Megatron's optimizers that orthogonalise, by their names in its registry.
_MEGATRON_NAMES = ("muon", "adaptive_muon")


def mark_kv_up(w_uk: nn.Parameter, w_uv: nn.Parameter, layer: KVUp) -> None:
    """Set the attribute of a layer's weights [heads * head_dim, C], which Megatron's Muon follows.

    Raises:
        ValueError: If Megatron's Muon cannot, and the choice is explicit.
    """
    for part, weight in enumerate((w_uk, w_uv)):
        setattr(weight, ATTRIBUTE, KVUpPart(layer, part))
    if layer.update == "split":
        return
    why_not = _follow_in_megatron()
    if why_not is None:
        return
    if layer.update != "auto":
        raise ValueError(
            f"muon_kv_up={layer.update!r} needs a Megatron whose Muon can be made to follow it, as "
            f"0.19's: {why_not}; use 'auto' or 'split', which leave it alone"
        )
    log_once(logger, "Megatron's Muon does not follow muon_kv_up", why_not)


def follow_kv_up_marks(optimizer: Optimizer) -> None:
    """Make an optimizer of PyTorch's kind step as the marks of its parameters say.

    Call it before anything replaces the optimizer's parameters. Megatron's Muon needs no call.

    Args:
        optimizer: It may be any that computes an update from one matrix and its gradient, and
            keeps states that are scalars or have the matrix's rows.

    Raises:
        ValueError: If it has no weight of an AbsorbedMLASelfAttention, or one of two to combine.
    """
    if not kv_up_weights(optimizer):
        raise ValueError(
            "optimizer must have the linear_k_up_proj and linear_v_up_proj weights of an "
            "AbsorbedMLASelfAttention, got one without; call follow_kv_up_marks as soon as it is "
            "made of the model's parameters"
        )
    _follow(optimizer)


def _follow(optimizer: Optimizer) -> None:
    """Replace the optimizer's step, unless nothing is to do or it was done before."""
    layers = [
        orthogonalization_groups(layer, weights)
        for layer, weights in kv_up_weights(optimizer).items()
    ]
    matrices = [entry for layer in layers for entry in layer]
    if not matrices or hasattr(optimizer.step, _FOLLOWS):
        return
    plain = optimizer.step
    run = Step(plain, matrices)

    @functools.wraps(plain)
    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        return run(self, closure)

    setattr(step, _FOLLOWS, True)
    # A bound method, because PyTorch's learning-rate schedulers unwrap it.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _follow_in_megatron() -> str | None:
    """Let every Muon that Megatron makes from now on follow the marks; or say why it cannot."""
    try:
        module = importlib.import_module(OPTIMIZERS)
    except ImportError:
        return None  # A release without Muon: there is nothing to follow.
    try:
        registry = MUON_REGISTRY.of(module)
        entries = [registry[name] for name in _MEGATRON_NAMES]
        classes = [entry.optimizer_cls for entry in entries]
    except (AttributeError, KeyError) as error:
        return f"{OPTIMIZERS} has another registry ({error!r})"
    for entry, optimizer_class in zip(entries, classes):
        if not hasattr(optimizer_class, _FOLLOWS):
            entry.optimizer_cls = _following(optimizer_class)
    return None


def _following(optimizer_class: type[Optimizer]) -> Callable[..., Optimizer]:
    @functools.wraps(optimizer_class, updated=())
    def build(*args, **kwargs) -> Optimizer:
        optimizer = optimizer_class(*args, **kwargs)
        _follow(optimizer)
        return optimizer

    setattr(build, _FOLLOWS, True)
    return build
