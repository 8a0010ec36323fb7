"""Remembering what a choice among backends said."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kept_on_gpu(
    maxsize: int, device_of: Callable[..., torch.device]
) -> Callable[[_Function], _Function]:
    """Cache a function where its arguments are about a GPU.

    Every layer asks in every step, and asking tries packages. On a CPU the answer may change: tests
    turn Triton's interpreter on and off.

    Args:
        maxsize: Results that are kept, the latest used ones.
        device_of: The device that the arguments are about.
    """

    def decorate(function: _Function) -> _Function:
        kept = functools.lru_cache(maxsize)(function)

        @functools.wraps(function)
        def find(*args: Any) -> Any:
            return (function if device_of(*args).type == "cpu" else kept)(*args)

        return find  # type: ignore[return-value]

    return decorate
