"""Registration of functions as operators of PyTorch, which cost the host little to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NAMESPACE = "absorbed_mla"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")


def operator(function: Callable[..., Any]) -> torch._ops.OpOverload:
    """The operator ``absorbed_mla::<name of function>``, for tensors of any device.

    It changes no argument and returns neither one nor a view of one. ``torch.library.custom_op``
    makes the same, but goes through Python code for gradients and aliases at every call, which
    takes the host twice as long.

    Args:
        function: Annotated, for the schema. ``torch.compile`` does not trace into it. Its results
            have no gradient: asking for it is an error.
    """
    name = function.__name__

    @torch.compiler.disable
    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return _WithoutGradient.apply(function, *args)
        return function(*args)

    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *args):
        ctx.name = function.__name__
        return function(*args)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{_NAMESPACE}::{ctx.name} has no gradient")
