"""Slots of a paged KV cache: where the positions of a request lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


class CachedRows:
    """A cache as one axis of rows, in which every position of every request has a slot.

    Nothing is copied: a slot counts rows of the memory that the cache is a view of, some of which
    may be others'. Memory that was never written may hold anything, NaN too.

    Args:
        cache: [blocks, block_size, D]; with other strides than those of whole rows it is copied.
    """

    def __init__(self, cache: Tensor) -> None:
        width = cache.shape[-1]
        whole = cache.stride(-1) == 1 and not any(s % width for s in cache.stride()[:2])
        cache = cache if whole else cache.contiguous()
        self.block_size = cache.shape[1]
        self.of_block, self.of_position = (stride // width for stride in cache.stride()[:2])
        last = (len(cache) - 1) * self.of_block + (self.block_size - 1) * self.of_position
        # [slots, 1, D], as the key axis of a batch of one.
        self.rows = cache.as_strided(
            (last + 1 if cache.numel() else 0, 1, width), (width, width, 1)
        )

    def slots(self, positions: Tensor, tables: Tensor) -> Tensor:
        """Slots of the positions of some tokens' requests.

        Args:
            positions: int32 [T, K], -1 for none.
            tables: The block table of each token's request, int32 [T, blocks].

        Returns:
            int32 [T, K], -1 for none.
        """
        known = positions.clamp(min=0)
        # A row of the table is as long as the longest request; what lies behind is not read.
        column = (known // self.block_size).clamp_(max=tables.shape[1] - 1)
        block = tables.gather(1, column.long())
        slot = block * self.of_block + known % self.block_size * self.of_position
        return slot.masked_fill_(positions < 0, -1).to(torch.int32)
