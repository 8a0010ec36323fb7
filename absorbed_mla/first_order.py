"""Backward passes that cannot be differentiated again, and say so instead of giving wrong values.

``torch.autograd.function.once_differentiable`` hangs its error on copies that are detached from the
inputs: ``torch.autograd.grad(gradient, x)`` prunes them as no way to ``x``, and a gradient whose
incoming gradient is constant carries no error at all. Here the error hangs on the real tensors.
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


def first_order_only(backward: Callable) -> Callable:
    """Decorate the ``backward`` of an autograd function.

    It runs without autograd. Under ``create_graph=True`` its results depend on the incoming
    gradients and on the saved tensors, and whoever differentiates them gets a RuntimeError.
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
    """Have ``backward(create_graph=True)`` raise at the output of a recomputed region.

    Megatron's checkpoints return gradients that depend on nothing, so that derivatives of those
    would leave terms out.
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
    """The gradients, whose derivatives towards the tensors they depend on raise."""
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
    """The identity of its first tensors; a function of the others whose derivative raises."""

    @staticmethod
    def forward(ctx, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(_MESSAGE)
