"""Context parallelism by a ring: every rank sees the tokens of one rank at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.batch_invariant.parts import wide
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
        """One for every rank; with a window, early and late keys are one each if any is seen."""
        if self.window is None:
            return self.layout.cp_size
        cpu = torch.device("cpu")
        ranks = range(self.layout.cp_size)
        return sum(len(self.layout.window_blocks(rank, self.window, cpu)) for rank in ranks)

    def begin(self, kv: Tensor) -> None:
        """See ``LatentExchange``."""
        self._first = self._pass_on(kv)

    def blocks(self, kv: Tensor, keep: bool) -> Iterator[KeyBlock]:
        """This rank's own keys, then the previous rank's, and so on; nothing is kept."""
        for rank, there in self._arriving(kv):
            for _, block in self._blocks_of(rank, there):
                yield block

    def _arriving(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Ranks and their latents."""
        transfer, self._first = self._first or self._pass_on(kv), None
        size = self.layout.cp_size
        for step in range(size):
            yield (self.layout.cp_rank - step) % size, kv
            if step + 1 < size:
                kv = transfer.received()
            if step + 2 < size:
                transfer = self._pass_on(kv)

    def _blocks_of(self, rank: int, kv: Tensor) -> Iterator[tuple[Tensor | None, KeyBlock]]:
        """The blocks of a rank's latents, and which of them each has, None for all."""
        if self.window is None:
            spans = self.layout.block_spans(rank, self.causal)
            yield None, KeyBlock(kv, spans, partial(self._tokens_of, rank, kv.device))
            return
        for rows, spans in self.layout.window_blocks(rank, self.window, kv.device):
            tokens = partial(self._tokens_of, rank, kv.device, rows)
            yield rows, KeyBlock(kv.index_select(0, rows), spans, tokens)

    def _tokens_of(self, rank: int, device: torch.device, rows: Tensor | None = None) -> Tensor:
        tokens = self.layout.tokens(rank).to(device)
        return tokens if rows is None else tokens[rows]

    def gradient(self, kv: Tensor, block_gradient: Callable[[KeyBlock], Tensor]) -> Tensor:
        """See ``LatentExchange``."""
        grads = (self._gradient_of(*one, block_gradient) for one in self._arriving(kv))
        own = next(grads)
        # All others have been through the ranks between their own and this one.
        transfer = self._pass_on(next(grads))
        for grad in grads:
            transfer = self._pass_on(grad.add_(transfer.received()))
        self._gradient = (own, transfer)
        return gradient_in_flight(kv)

    def _gradient_of(
        self, rank: int, kv: Tensor, block_gradient: Callable[[KeyBlock], Tensor]
    ) -> Tensor:
        """The gradient of a rank's latents from this rank's queries."""
        total: Tensor | None = None
        for rows, block in self._blocks_of(rank, kv):
            grad = block_gradient(block)
            if rows is None:
                return grad
            total = grad.new_zeros(kv.shape) if total is None else total
            # Each row once: the order of sums is fixed.
            total.index_add_(0, rows, grad)
        return kv.new_zeros(kv.shape, dtype=wide(kv.dtype)) if total is None else total

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
