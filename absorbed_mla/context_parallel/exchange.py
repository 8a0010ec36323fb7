"""What both ways of exchanging latents have in common."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.context_parallel.deferred import begin_exchange
from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.core_attention.key_source import KeyBlock


class ExchangedKeys(ABC):
    """Keys of sequences that are cut over the ranks of a group; a ``KeySource``.

    What travels is [latent | k_rope], once for all heads, and in backward its gradient, summed over
    the ranks in fp32 (fp64).

    Args:
        layout: The part that this rank holds.
        causal: Whether a token sees only itself and earlier tokens of its sequence.
        group: The ranks, in the order of ``layout``.
        begun_again: Whether :meth:`start` will be called again before backward, by recomputation:
            what was received need not be kept then.
    """

    def __init__(
        self,
        layout: ContextParallelLayout,
        causal: bool,
        group: dist.ProcessGroup,
        begun_again: bool,
    ) -> None:
        self.layout = layout
        self.causal = causal
        self.group = group
        self.begun_again = begun_again

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Number of blocks that the keys come in."""

    def positions(self, device: torch.device) -> Tensor:
        """Position of each of this rank's tokens in its own sequence, int64 [S]."""
        return cached_index(ContextParallelLayout.positions, self.layout, device)

    def query_tokens(self, device: torch.device) -> Tensor:
        """The token of the whole batch or pack that each of this rank's tokens is, int64 [S]."""
        return cached_index(ContextParallelLayout.tokens, self.layout, device)

    def start(self, kv: Tensor) -> Tensor:
        """Begin to exchange ``kv`` [S, B, C + rope]; attend with what this returns."""
        return begin_exchange(kv.contiguous(), self)

    @abstractmethod
    def begin(self, kv: Tensor) -> None:
        """Begin to send ``kv``, without waiting."""

    @abstractmethod
    def blocks(self, kv: Tensor, keep: bool) -> Iterator[KeyBlock]:
        """All keys that this rank's queries see, block by block."""

    @abstractmethod
    def gradient(self, kv: Tensor, block_gradient: Callable[[KeyBlock], Tensor]) -> Tensor:
        """Compute all blocks' gradients and begin to send them where they belong."""

    @abstractmethod
    def finish_gradient(self) -> Tensor:
        """The gradient of this rank's ``kv`` from all ranks' queries, fp32 (fp64)."""


@functools.lru_cache(maxsize=32)
def cached_index(
    make: Callable[[ContextParallelLayout], Tensor],
    layout: ContextParallelLayout,
    device: torch.device,
) -> Tensor:
    """``make(layout)`` on ``device``; all layers of a model ask for the same."""
    # An index made while evaluating must serve training as well.
    with torch.inference_mode(False):
        return make(layout).to(device)
