"""Where the keys of an attention call come from: this process, or others besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Span, self_attention_spans
from absorbed_mla.sequences import SequenceLayout


@dataclass(frozen=True)
class KeyBlock:
    """Some of the keys, as latents.

    Attributes:
        kv: [latent | k_rope], [S_k, B, C + rope].
        spans: Which of this process's queries see which of these keys; a query is in at most one.
        tokens: Makes int64 [S_k], the token of the whole batch or pack that each key is.
    """

    kv: Tensor
    spans: tuple[Span, ...]
    tokens: Callable[[], Tensor]


class KeySource(Protocol):
    """The keys of one call of the attention.

    A call of the layer makes one, hands it the latents of this process's tokens by :meth:`start`,
    and passes it to the core attention, which visits the blocks.
    """

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the keys come in."""
        ...

    def positions(self, device: torch.device) -> Tensor | None:
        """Position of each of this process's tokens in its own sequence, int64 [S].

        None where token i has position i.
        """
        ...

    def query_tokens(self, device: torch.device) -> Tensor:
        """The token of the whole batch or pack that each of this process's tokens is, int64 [S]."""
        ...

    def start(self, kv: Tensor) -> Tensor:
        """Begin to exchange ``kv`` [S, B, C + rope], the latents of this process's tokens.

        Returns:
            ``kv`` for the attention; what else uses it, autograd would not see.
        """
        ...

    def blocks(self, kv: Tensor, keep: bool) -> Iterator[KeyBlock]:
        """All keys that this process's queries see, block by block.

        Args:
            kv: What :meth:`start` returned.
            keep: Whether backward will ask for them again.
        """
        ...

    def gradient(self, kv: Tensor, block_gradient: Callable[[KeyBlock], Tensor]) -> Tensor:
        """Gradient of what :meth:`start` returned.

        Args:
            kv: What it returned.
            block_gradient: Gradient [S_k, B, C + rope] of a block from this process's queries, in
                the dtype it shall be summed in.
        """
        ...


class LocalKeys:
    """The keys of this process, which holds whole sequences.

    Args:
        layout: Its sequences.
        causal: Whether a token sees only itself and earlier tokens of its sequence.
    """

    def __init__(self, layout: SequenceLayout, causal: bool) -> None:
        self.layout = layout
        self.causal = causal

    @property
    def num_blocks(self) -> int:
        """See :class:`KeySource`."""
        return 1

    def positions(self, device: torch.device) -> Tensor | None:
        """See :class:`KeySource`."""
        return self.layout.positions(device) if self.layout.packed else None

    def query_tokens(self, device: torch.device) -> Tensor:
        """See :class:`KeySource`."""
        return torch.arange(self.layout.num_tokens, device=device)

    def start(self, kv: Tensor) -> Tensor:
        """See :class:`KeySource`."""
        return kv

    def blocks(self, kv: Tensor, keep: bool) -> Iterator[KeyBlock]:
        """See :class:`KeySource`."""
        spans = self_attention_spans(self.layout, self.causal)
        yield KeyBlock(kv, spans, lambda: self.query_tokens(kv.device))

    def gradient(self, kv: Tensor, block_gradient: Callable[[KeyBlock], Tensor]) -> Tensor:
        """See :class:`KeySource`."""
        [block] = self.blocks(kv, keep=False)
        return block_gradient(block).to(kv.dtype)
