"""Context parallelism by a ring: every rank sees the tokens of one rank at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.context_parallel.exchange import LatentExchange, gradient_in_flight
from absorbed_mla.core_attention.key_source import KeyBlock


class Ring(LatentExchange):
    """Latents travel from rank to rank; while one block is attended to, the next one arrives.

    In backward they travel again, each block's gradient one step behind it, so that every rank adds
    its share; the last rank that a block visits sends the gradient home.
    """

    name = "p2p"
    summary = "a ring: the latents of one rank at a time, overlapped with the attention"

    _first: Transfer | None = None
    _gradient: tuple[Tensor, Transfer] | None = None

    @property
    def num_blocks(self) -> int:
        """One for every rank."""
        return self.layout.cp_size

    def begin(self, kv: Tensor) -> None:
        """See ``LatentExchange``."""
        self._first = self._pass_on(kv)

    def blocks(self, kv: Tensor, keep: bool) -> Iterator[KeyBlock]:
        """This rank's own block, then the previous rank's, and so on; nothing is kept."""
        transfer, self._first = self._first or self._pass_on(kv), None
        for step in range(self.num_blocks):
            rank = (self.layout.cp_rank - step) % self.num_blocks
            spans = self.layout.block_spans(rank, self.causal)
            yield KeyBlock(kv, spans, partial(self._tokens_of, rank, kv.device))
            if step + 1 < self.num_blocks:
                kv = transfer.received()
            if step + 2 < self.num_blocks:
                transfer = self._pass_on(kv)

    def _tokens_of(self, rank: int, device: torch.device) -> Tensor:
        return self.layout.tokens(rank).to(device)

    def gradient(self, kv: Tensor, block_gradient: Callable[[KeyBlock], Tensor]) -> Tensor:
        """See ``LatentExchange``."""
        blocks = self.blocks(kv, keep=False)
        own = block_gradient(next(blocks))
        # Every other block has been through the ranks between its own and this one.
        transfer = self._pass_on(block_gradient(next(blocks)))
        for block in blocks:
            grad = block_gradient(block)
            transfer = self._pass_on(grad.add_(transfer.received()))
        self._gradient = (own, transfer)
        return gradient_in_flight(kv)

    def finish_gradient(self) -> Tensor:
        """See ``LatentExchange``."""
        assert self._gradient is not None, "the attention's backward comes first"
        (own, transfer), self._gradient = self._gradient, None
        return own + transfer.received()

    def _pass_on(self, x: Tensor) -> Transfer:
        return Transfer(x.contiguous(), self.group, self.layout.cp_rank)


class Transfer:
    """One tensor on its way to the next rank of a ring, and one from the previous rank."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup, rank: int) -> None:
        self._sent, self._buffer = x, torch.empty_like(x)
        size = group.size()
        to, source = (dist.get_global_rank(group, (rank + by) % size) for by in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, to, group),
                dist.P2POp(dist.irecv, self._buffer, source, group),
            ]
        )

    def received(self) -> Tensor:
        """What came, once it is there and what was sent is no longer needed."""
        for work in self._works:
            work.wait()
        return self._buffer


ENTRY = Ring
