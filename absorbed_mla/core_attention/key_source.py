"""Where the keys of an attention call come from: this rank, other ranks, or a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Spans


@dataclass(frozen=True)
class KeyBlock:
    """A block of keys, as latents.

    Attributes:
        kv: [latent | k_rope], [S_k, B, C + R].
        spans: Which of this rank's queries see which of these keys.
        tokens: Makes int64 [S_k]: the global token index, in the whole batch or pack, of each key.
    """

    kv: Tensor
    spans: Spans
    tokens: Callable[[], Tensor]


class KeySource(Protocol):
    """All keys that this rank's queries see, block by block."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        ...

    def blocks(self, kv: Tensor, keep: bool) -> Iterator[KeyBlock]:
        """Visit the blocks.

        Args:
            kv: [latent | k_rope] of this rank's tokens.
            keep: Whether backward will visit them again.
        """
        ...


class TrainableKeySource(KeySource, Protocol):
    """A key source with a gradient.

    Every forward of a layer makes one, hands it the latents of this rank's tokens with
    :meth:`start`, and passes it to the core attention.
    """

    @property
    def max_position(self) -> int:
        """One more than the largest position of any token."""
        ...

    def positions(self, device: torch.device) -> Tensor | None:
        """Position of each of this rank's tokens in its own sequence, int64 [S].

        None where token i has position i.
        """
        ...

    def query_tokens(self, device: torch.device) -> Tensor:
        """Global token index, in the whole batch or pack, of each of this rank's tokens, [S]."""
        ...

    def start(self, kv: Tensor) -> Tensor:
        """Begin to exchange ``kv`` [S, B, C + R], the latents of this rank's tokens.

        Returns:
            ``kv`` for the attention. Nothing else may use it: autograd would miss that use.
        """
        ...

    def gradient(self, kv: Tensor, block_gradient: Callable[[KeyBlock], Tensor]) -> Tensor:
        """Gradient of what :meth:`start` returned.

        Args:
            kv: What it returned.
            block_gradient: Gradient [S_k, B, C + R] of a block from this rank's queries, in the
                dtype in which ranks sum it.
        """
        ...


class WholeKeySource(TrainableKeySource, Protocol):
    """A key source whose keys are one block, so that they have one axis."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that have the tokens; None if this one has all."""
        ...

    def spans(self) -> Spans:
        """Which of this rank's queries see which keys."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Rows of all tokens on the axis of the keys, given those of this rank's tokens.

        Args:
            x: [S, ...]. Backward sums its gradient over the ranks.
        """
        ...
