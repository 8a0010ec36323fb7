"""Letting communication run on while autograd goes on to other work."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from absorbed_mla.first_order import first_order_only


class Exchange(Protocol):
    """Communication of a tensor in forward and of its gradient in backward."""

    def begin(self, x: Tensor) -> None:
        """Begin to send ``x``."""
        ...

    def finish_gradient(self) -> Tensor:
        """Wait for the gradient of ``x``."""
        ...


def begin_exchange(x: Tensor, exchange: Exchange) -> Tensor:
    """Begin to send ``x``; returns it for the attention, whose backward sends the gradient.

    Autograd runs steps in the reverse order of their creation, so backward asks ``exchange`` for
    the gradient only after it has done all that forward did between this call and the attention.
    """
    return _Begin.apply(x, exchange)


def gradient_to_come(x: Tensor) -> Tensor:
    """What the attention's backward returns as the gradient of ``x`` that is still on its way."""
    return x.new_zeros(()).expand(x.shape)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, exchange: Exchange) -> Tensor:
        exchange.begin(x)
        ctx.exchange, ctx.dtype = exchange, x.dtype
        return x.view_as(x)

    @staticmethod
    @first_order_only
    def backward(ctx, to_come: Tensor):
        return ctx.exchange.finish_gradient().to(ctx.dtype), None
