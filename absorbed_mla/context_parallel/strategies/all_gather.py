"""Context parallelism by gathering: every rank gets every latent, in one collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from absorbed_mla.context_parallel.exchange import LatentExchange, gradient_in_flight
from absorbed_mla.core_attention.key_source import KeyBlock
from absorbed_mla.core_attention.masks.spans import Spans


class AllGather(LatentExchange):
    """One all-gather of the latents in forward, one reduce-scatter of their gradient in backward.

    During the attention every rank holds the latents of the whole sequence: S (C + R) numbers, as
    much as keys and values of two of the 128 heads at DeepSeek-V3's dimensions.
    """

    name = "all_gather"
    summary = "one all-gather of the latents, one reduce-scatter of their gradient"

    _gathered: Tensor | None = None
    _pending: tuple[Tensor, dist.Work] | None = None
    _gradient: tuple[Tensor, dist.Work] | None = None

    @property
    def num_blocks(self) -> int:
        """One, of all tokens."""
        return 1

    def begin(self, kv: Tensor) -> None:
        """See ``LatentExchange``."""
        self._pending = self._send(kv)

    def _send(self, kv: Tensor) -> tuple[Tensor, dist.Work]:
        rank_major = kv.new_empty(self.layout.cp_size * len(kv), *kv.shape[1:])
        work = dist.all_gather_into_tensor(rank_major, kv, group=self.group, async_op=True)
        return rank_major, work

    def blocks(self, kv: Tensor, keep: bool) -> Iterator[KeyBlock]:
        """One block: all tokens in the order of the whole batch or pack."""
        gathered = self._gathered
        if gathered is None:
            rank_major, work = self._pending or self._send(kv)
            self._pending = None
            work.wait()
            in_order = self.layout.index("sequence_order", kv.device)
            gathered = rank_major.index_select(0, in_order)
            if keep and self.kept:
                self._gathered = gathered
        yield KeyBlock(
            gathered, self.spans(), lambda: torch.arange(len(gathered), device=kv.device)
        )

    def gradient(self, kv: Tensor, block_gradient: Callable[[KeyBlock], Tensor]) -> Tensor:
        """See ``LatentExchange``."""
        [block] = self.blocks(kv, keep=False)
        rank_major = self.layout.index("rank_major", kv.device)
        grad = block_gradient(block).index_select(0, rank_major)
        own = grad.new_empty(kv.shape)
        work = dist.reduce_scatter_tensor(own, grad, group=self.group, async_op=True)
        self._gradient = (own, work)
        return gradient_in_flight(kv)

    def finish_gradient(self) -> Tensor:
        """See ``LatentExchange``."""
        assert self._gradient is not None, "the attention's backward comes first"
        (own, work), self._gradient = self._gradient, None
        work.wait()
        return own

    def spans(self) -> Spans:
        """See ``WholeKeySource``."""
        return self.layout.gathered_spans(self.causal)

    def gather(self, x: Tensor) -> Tensor:
        """See ``WholeKeySource``."""
        rank_major = gather_from_sequence_parallel_region(x.contiguous(), group=self.group)
        return rank_major.index_select(0, self.layout.index("sequence_order", x.device))


ENTRY = AllGather
