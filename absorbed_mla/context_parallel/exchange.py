"""Base class of latent exchanges, and the overlap of their communication with autograd."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.core_attention.key_source import KeyBlock
from absorbed_mla.once_differentiable import once_differentiable


class LatentExchange(ABC):
    """Keys of sequences that are distributed over the ranks of a group. A ``TrainableKeySource``.

    Ranks exchange [latent | k_rope], once for all heads, and in backward its gradient, summed over
    the ranks in fp32 (fp64).

    Args:
        layout: The part that this rank holds.
        causal: Whether a token sees only itself and earlier tokens of its sequence.
        group: The ranks, in the order of ``layout``.
        kept: Whether what was received may be kept for backward, which otherwise receives it again.
        window: Keys that a query sees at most, itself included; None for all.
    """

    def __init__(
        self,
        layout: ContextParallelLayout,
        causal: bool,
        group: dist.ProcessGroup,
        kept: bool,
        window: int | None = None,
    ) -> None:
        self.layout = layout
        self.causal = causal
        self.group = group
        self.kept = kept
        self.window = window

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Number of blocks that the keys come in."""

    @property
    def max_position(self) -> int:
        """One more than the largest position of any token of any rank."""
        return self.layout.sequences.max_position

    def positions(self, device: torch.device) -> Tensor:
        """Position of each of this rank's tokens in its own sequence, int64 [S]."""
        return self.layout.index("positions", device)

    def query_tokens(self, device: torch.device) -> Tensor:
        """Global token index, in the whole batch or pack, of each of this rank's tokens, [S]."""
        return self.layout.index("tokens", device)

    def start(self, kv: Tensor) -> Tensor:
        """Begin to exchange ``kv`` [S, B, C + R].

        Autograd runs backward steps in the reverse order of forward. The gradient is therefore
        waited for only after the backward of everything that forward did between this call and the
        attention, and its communication overlaps with that work.

        Returns:
            ``kv``, to be given to the attention.
        """
        return _Start.apply(kv.contiguous(), self)

    @abstractmethod
    def begin(self, kv: Tensor) -> None:
        """Begin to send ``kv``, without waiting."""

    @abstractmethod
    def blocks(self, kv: Tensor, keep: bool) -> Iterator[KeyBlock]:
        """All keys that this rank's queries see, block by block."""

    @abstractmethod
    def gradient(self, kv: Tensor, block_gradient: Callable[[KeyBlock], Tensor]) -> Tensor:
        """Compute the gradients of all blocks and begin to send them to the ranks they belong to.

        Returns:
            :func:`gradient_in_flight`; :meth:`finish_gradient` has the values.
        """

    @abstractmethod
    def finish_gradient(self) -> Tensor:
        """Wait for the gradient of this rank's ``kv`` from all ranks' queries, fp32 (fp64)."""


def gradient_in_flight(x: Tensor) -> Tensor:
    """A placeholder for the gradient of ``x``, which is still being communicated."""
    return x.new_zeros(()).expand(x.shape)


class _Start(torch.autograd.Function):
    """The identity; begins an exchange in forward and finishes it in backward."""

    @staticmethod
    def forward(ctx, kv: Tensor, exchange: LatentExchange) -> Tensor:
        exchange.begin(kv)
        ctx.exchange, ctx.dtype = exchange, kv.dtype
        return kv.view_as(kv)

    @staticmethod
    @once_differentiable
    def backward(ctx, placeholder: Tensor):
        return ctx.exchange.finish_gradient().to(ctx.dtype), None
