"""What a run of layers leaves for the time when it is recomputed in backward."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class Recomputation:
    """Belongs to one call of an activation checkpoint around layers, and ends with it.

    Attributes:
        kept: What the recomputation will need of the first run, by whoever left it.
        seen: Who was in the first run.
    """

    kept: dict[object, Any] = field(default_factory=dict)
    seen: set[object] = field(default_factory=set)


def current_recomputation() -> Recomputation | None:
    """Of the innermost checkpoint that this code runs in, the same in both runs; None outside.

    The context of the checkpoint is the one object that is there in both runs and belongs to one
    microbatch. A global variable would mix up microbatches, of which a pipeline has several in
    flight.
    """
    ctx = _current_context()
    if ctx is None:
        return None
    found = getattr(ctx, _ATTRIBUTE, None)
    if found is None:
        found = Recomputation()
        setattr(ctx, _ATTRIBUTE, found)
    return found


def is_never_recomputed() -> bool:
    """Whether this is the first run of a checkpoint that has no second one.

    Backward does not come to a checkpoint none of whose inputs needs a gradient, so parameters in
    it get none.
    """
    if torch.is_grad_enabled():
        return False
    ctx = _current_context()
    return ctx is not None and not any(ctx.needs_input_grad)


def _current_context() -> Any:
    """Of the innermost checkpoint that this code runs in; None outside.

    Megatron's ``checkpoint``, TransformerEngine's and PyTorch's reentrant one are autograd
    functions that call their ``ctx.run_function`` in forward and in backward. Nothing else leads to
    their context, so it is looked up in the callers' frames.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and "ctx" in code.co_varnames[:1]:
            ctx = frame.f_locals.get("ctx")
            if hasattr(ctx, "run_function"):
                return ctx
        frame = frame.f_back  # type: ignore[assignment]
    return None


_ATTRIBUTE = "_absorbed_mla_recomputation"
