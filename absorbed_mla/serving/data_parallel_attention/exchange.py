"""The exchange of tokens between data-parallel ranks before and after a sharded layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.caching import this_run


class TokenExchange:
    """The ranks that weights are divided over, each with tokens of its own.

    Every method but the constructor is collective. Ranks may have any number of tokens, or none:
    messages are padded to the longest, what is computed is not.

    Attributes:
        size: Number of ranks.
        rank: This one's number.
        tokens: How many tokens each rank has in the forward pass that runs; the embedding sets it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = group.size(), group.rank()
        self.tokens: Sequence[int] = [0] * self.size

    def counts(self, count: int) -> list[int]:
        """``count`` of every rank; waits for the device, but in a step that becomes a CUDA graph.

        All ranks take the graph of the same step: they have equally many tokens, padding included.
        """
        if this_run() is not None:
            return [count] * self.size
        own = torch.tensor([count], device=torch.cuda.current_device())
        found = own.new_empty(self.size)
        dist.all_gather_into_tensor(found, own, group=self.group)
        return found.tolist()

    def gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, in their order.

        Args:
            x: This rank's, [own, ...].
            counts: Rows of every rank.

        Returns:
            [sum(counts), ...].
        """
        found = x.new_empty(self.size * max(counts), *x.shape[1:])
        dist.all_gather_into_tensor(found, _padded(x, max(counts)), group=self.group)
        return self._without_padding(found, counts)

    def sum_own(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's rows of the sum over all ranks.

        Args:
            x: Of all rows, [sum(counts), ...].
            counts: As of :meth:`gather`.

        Returns:
            [own, ...].
        """
        found = x.new_empty(max(counts), *x.shape[1:])
        dist.reduce_scatter_tensor(found, self._with_padding(x, counts), group=self.group)
        return found[: counts[self.rank]]

    def join_own(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's rows of all ranks' columns.

        Args:
            x: All rows of this rank's columns, [sum(counts), W].
            counts: As of :meth:`gather`.

        Returns:
            [own, size * W].
        """
        sent = self._with_padding(x, counts)
        found = torch.empty_like(sent)
        # Not all process groups exchange all dtypes, but all of them bytes.
        dist.all_to_all_single(found.view(torch.uint8), sent.view(torch.uint8), group=self.group)
        found = found.unflatten(0, (self.size, -1))[:, : counts[self.rank]]
        return found.transpose(0, 1).flatten(1)

    def _without_padding(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        if min(counts) == max(counts):
            return x
        parts = x.unflatten(0, (self.size, -1))
        return torch.cat([part[:count] for part, count in zip(parts, counts)])

    def _with_padding(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        if min(counts) == max(counts):
            return x.contiguous()
        return torch.cat([_padded(part, max(counts)) for part in x.split(list(counts))])


def _padded(x: Tensor, rows: int) -> Tensor:
    if len(x) == rows:
        return x.contiguous()
    return torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))
