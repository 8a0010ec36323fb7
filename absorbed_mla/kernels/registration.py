"""Registration of functions as operators of PyTorch, which cost the host little to call."""

from __future__ import annotations

from collections.abc import Callable

import torch

_NAMESPACE = "absorbed_mla"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")


def operator(function: Callable) -> torch._ops.OpOverload:
    """The operator ``absorbed_mla::<name of function>`` for tensors of any device.

    It changes no argument, returns none, nor a view of one, and has no gradient. Unlike
    ``torch.library.custom_op``, which looks for gradients and aliases in Python at every call, it
    goes to the function directly: that halves what a call costs the host.

    Args:
        function: Its annotations make the schema; ``torch.compile`` does not trace into it.
    """
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    untraced = torch.compiler.disable(function)
    _LIBRARY.impl(name, untraced, "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, _NAMESPACE), name).default
