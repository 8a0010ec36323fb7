"""Autograd functions that are once differentiable: second derivatives raise an error.

The backward passes of this package are not differentiable themselves.
``torch.autograd.function.once_differentiable`` does not make that an error in every case: it
attaches the error to copies that are detached from the inputs, so ``torch.autograd.grad(gradient,
x)`` finds no path to ``x`` and skips it, and a gradient whose incoming gradient is constant has no
error attached at all. Here the error is attached to the inputs themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

_MESSAGE = (
    "AbsorbedMLASelfAttention has first derivatives only: a gradient made with create_graph=True "
    "depends on the attention's input and parameters in a way that autograd cannot follow. Take "
    "Hessian-vector products as finite differences of gradients, or differentiate the equations "
    "in plain PyTorch"
)


def once_differentiable(backward: Callable) -> Callable:
    """Decorator for the ``backward`` of an autograd function that has no second derivative.

    ``backward`` runs without autograd. Under ``create_graph=True`` its results are connected to the
    incoming gradients and the saved tensors, and differentiating them raises a RuntimeError.
    """

    @functools.wraps(backward)
    def run(ctx, *grads):
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        return _refuse_derivatives(found, (*grads, *ctx.saved_tensors))

    return run


def refuse_graph_of_gradients(checkpointed: Tensor) -> None:
    """Make ``backward(create_graph=True)`` raise at the output of a recomputed region.

    Gradients from Megatron's activation checkpoints have no graph, so second derivatives through
    them would lack terms.
    """
    if checkpointed.requires_grad:
        checkpointed.register_hook(_refuse_graph)


def _refuse_graph(_: Tensor) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True does not reach through recomputed activations (recompute_modules); "
            f"besides, {_MESSAGE}"
        )


def _refuse_derivatives(gradients, depend_on):
    """The gradients, connected to the tensors they depend on by a function that raises."""
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    places = [i for i, gradient in enumerate(gradients) if isinstance(gradient, Tensor)]
    tensors = [x for x in depend_on if isinstance(x, Tensor) and x.requires_grad]
    if not places or not tensors:
        return gradients
    marked = _Refuse.apply(len(places), *(gradients[i] for i in places), *tensors)
    found = list(gradients)
    for place, gradient in zip(places, marked):
        found[place] = gradient
    return tuple(found)


class _Refuse(torch.autograd.Function):
    """Returns its first ``count`` tensors unchanged; its backward raises."""

    @staticmethod
    def forward(ctx, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(_MESSAGE)
