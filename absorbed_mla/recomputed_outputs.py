"""Outputs of Megatron's ``CheckpointWithoutOutput``, which are computed again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Outputs = tuple[Tensor, ...]


class SameLayout:
    """A function whose outputs lie in memory as they did, whenever it is called again.

    ``CheckpointWithoutOutput`` gives the outputs of the forward pass, which has no gradients, the
    storage of those that backward computes, with gradients. If their strides differed, the first
    outputs would have the numbers of others, and gradients would be wrong without an error.

    Args:
        function: Returns tensors.
    """

    def __init__(self, function: Callable[..., Outputs]) -> None:
        self._function = function
        self._layout: list | None = None

    def __call__(self, *args: Any) -> Outputs:
        """The function's outputs."""
        outputs = self._function(*args)
        layout = [_layout(output) for output in outputs]
        if self._layout is None:
            self._layout = layout
        assert layout == self._layout, f"outputs lie in memory as {layout}, not {self._layout}"
        return outputs


def _layout(x: Tensor) -> tuple:
    """Offset, and strides but of axes with one element, which are not walked."""
    walked = [stride for size, stride in zip(x.shape, x.stride()) if size > 1]
    return x.storage_offset(), *walked
