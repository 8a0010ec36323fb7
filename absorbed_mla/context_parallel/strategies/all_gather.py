"""Context parallelism by gathering: every rank gets every latent, in one collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.context_parallel.deferred import gradient_to_come
from absorbed_mla.context_parallel.exchange import ExchangedKeys, cached_index
from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.core_attention.key_source import KeyBlock


class AllGatheredKeys(ExchangedKeys):
    """One all-gather of the latents in forward, one reduce-scatter of their gradient in backward.

    Every rank holds the latents of the whole sequence for a while: S (C + rope) numbers, as much as
    two of 128 heads' keys and values at DeepSeek-V3's dimensions.
    """

    _gathered: Tensor | None = None
    _pending: tuple[Tensor, dist.Work] | None = None
    _gradient: tuple[Tensor, dist.Work] | None = None

    @property
    def num_blocks(self) -> int:
        """One, of all tokens."""
        return 1

    def begin(self, kv: Tensor) -> None:
        """See :class:`ExchangedKeys`."""
        self._pending = self._begin(kv)

    def _begin(self, kv: Tensor) -> tuple[Tensor, dist.Work]:
        rank_major = kv.new_empty(self.layout.cp_size * len(kv), *kv.shape[1:])
        work = dist.all_gather_into_tensor(rank_major, kv, group=self.group, async_op=True)
        return rank_major, work

    def blocks(self, kv: Tensor, keep: bool) -> Iterator[KeyBlock]:
        """One block: all tokens in the order of the whole batch or pack."""
        gathered = self._gathered
        if gathered is None:
            rank_major, work = self._pending or self._begin(kv)
            self._pending = None
            work.wait()
            in_order = cached_index(ContextParallelLayout.sequence_order, self.layout, kv.device)
            gathered = rank_major.index_select(0, in_order)
            if keep and not self.begun_again:
                self._gathered = gathered
        spans = self.layout.gathered_spans(self.causal)
        yield KeyBlock(gathered, spans, lambda: torch.arange(len(gathered), device=kv.device))

    def gradient(self, kv: Tensor, block_gradient: Callable[[KeyBlock], Tensor]) -> Tensor:
        """See :class:`ExchangedKeys`."""
        [block] = self.blocks(kv, keep=False)
        rank_major = cached_index(ContextParallelLayout.rank_major, self.layout, kv.device)
        grad = block_gradient(block).index_select(0, rank_major)
        own = grad.new_empty(kv.shape)
        work = dist.reduce_scatter_tensor(own, grad, group=self.group, async_op=True)
        self._gradient = (own, work)
        return gradient_to_come(kv)

    def finish_gradient(self) -> Tensor:
        """See :class:`ExchangedKeys`."""
        assert self._gradient is not None, "the attention's backward comes first"
        (own, work), self._gradient = self._gradient, None
        work.wait()
        return own
