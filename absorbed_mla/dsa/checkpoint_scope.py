"""State scoped to an activation checkpoint, the same in its forward and in its recomputation.

Checkpoints are autograd functions that call a ``run_function`` in forward and again in backward.
:func:`scope_checkpoints` lets each call of theirs run it in a :class:`CheckpointScope` of its own:

===================================================== =================== =====================
Class whose ``forward`` is wrapped                    Used by             If it is missing
===================================================== =================== =====================
``torch.utils.checkpoint.CheckpointFunction``         ``use_reentrant``   an error at import
``megatron.core.tensor_parallel.random.``             Megatron's own      an error at import
``CheckpointFunction``                                recomputation
``transformer_engine.pytorch.distributed.``           ``te_checkpoint``,  an error where that
``_CheckpointFunction``                               Megatron's for FP8  module is loaded
===================================================== =================== =====================
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.utils import checkpoint as torch_checkpoint

_TE_MODULE = "transformer_engine.pytorch.distributed"


@dataclass(eq=False)
class CheckpointScope:
    """State of one call of an activation checkpoint around layers; it ends with the call.

    A global variable would mix up microbatches, of which a pipeline has several in flight.

    Attributes:
        is_recomputed: Whether backward comes to the checkpoint: an input of it needs a gradient.
        kept: What the recomputation will need of the first run, by whoever left it.
        seen: Who was in the first run.
    """

    is_recomputed: bool
    kept: dict[object, Any] = field(default_factory=dict)
    seen: set[object] = field(default_factory=set)


class _Entered(threading.local):
    """The scopes that this thread is in; backward has threads of its own."""

    def __init__(self) -> None:
        self.scopes: list[CheckpointScope] = []


_entered = _Entered()


def current_scope() -> CheckpointScope | None:
    """Of the innermost checkpoint that this code runs in, the same in both runs; None outside."""
    return _entered.scopes[-1] if _entered.scopes else None


def is_never_recomputed() -> bool:
    """Whether this is the first run of a checkpoint that has no second one.

    Backward does not come to a checkpoint none of whose inputs needs a gradient, so parameters in
    it get none.
    """
    scope = current_scope()
    return not torch.is_grad_enabled() and scope is not None and not scope.is_recomputed


def scope_checkpoints() -> None:
    """Give every checkpoint that begins from now on a scope; again does nothing."""
    _wrap(torch_checkpoint.CheckpointFunction)
    _wrap(megatron_random.CheckpointFunction)
    if _TE_MODULE in sys.modules:
        _wrap(sys.modules[_TE_MODULE]._CheckpointFunction)


def _wrap(function: type[torch.autograd.Function]) -> None:
    original = function.forward
    if hasattr(original, "runs_in_scope"):
        return

    @functools.wraps(original)
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        scope = CheckpointScope(is_recomputed=any(ctx.needs_input_grad))
        return original(ctx, functools.partial(_run, scope, run_function), *args)

    forward.runs_in_scope = True  # type: ignore[attr-defined]
    function.forward = staticmethod(forward)  # type: ignore[method-assign]


def _run(
    scope: CheckpointScope, run_function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``run_function`` within a scope."""
    _entered.scopes.append(scope)
    try:
        return run_function(*args, **kwargs)
    finally:
        _entered.scopes.pop()
