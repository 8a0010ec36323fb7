"""Sliding windows over a paged cache, by any paged backend.

Backends see a row's keys from its first on. So the keys of every new token are copied to blocks of
their own, a bounded number of them at a time: a token costs what its window holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from absorbed_mla.inference.backend import PagedBackend
from absorbed_mla.inference.backends.reference import last_keys
from absorbed_mla.inference.rows import Rows

# Tokens in a block of copied keys, which suits every backend.
BLOCK_SIZE = 64
# Keys that are copied at a time: 72 MiB of latents at DeepSeek-V3's widths.
_MOST_KEYS = 2**16


@dataclass(frozen=True, eq=False)
class WindowedPagedBackend:
    """A ``PagedBackend`` whose tokens see the last keys of their rows.

    Attributes:
        backend: Attends to the copied keys.
        window: Keys that a token sees, itself included.
    """

    backend: PagedBackend
    window: int

    def forward(
        self,
        q_content: Tensor,
        q_rope: Tensor,
        cache: Tensor,
        rows: Rows,
        scale: float,
        key_start: int = 0,
        key_end: int | None = None,
        batch_invariant: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See ``backends.reference.paged_reference``."""
        assert not batch_invariant, "parity mode refuses windows"
        tokens, block_size = len(q_content), cache.shape[1]
        if not tokens:
            return self.backend.forward(q_content, q_rope, cache, rows, scale)
        pieces = rows.tables.get(
            ("window", self.window, tokens, block_size, key_start, key_end),
            lambda: self._pieces(rows, tokens, block_size, key_start, key_end),
        )
        found = []
        for piece, block, place, own in pieces:
            keys = cache[block, place].view(-1, BLOCK_SIZE, cache.shape[-1])
            found.append(self.backend.forward(q_content[piece], q_rope[piece], keys, own, scale))
        out, lse = zip(*found)
        return torch.cat(out), torch.cat(lse)

    def _pieces(
        self, rows: Rows, tokens: int, block_size: int, key_start: int, key_end: int | None
    ) -> list[tuple[slice, Tensor, Tensor, Rows]]:
        """Tokens that are computed together, where their keys are, and their rows over copies."""
        row, newest = last_keys(rows, tokens)
        oldest = (newest - self.window + 1).clamp(min=key_start)
        if key_end is not None:
            newest = newest.clamp(max=key_end - 1)
        count = (newest - oldest + 1).clamp(min=0)
        oldest = oldest - key_start
        blocks = -(-self.window // BLOCK_SIZE)
        within = torch.arange(blocks * BLOCK_SIZE, device=row.device)
        step = max(1, _MOST_KEYS // len(within))
        pieces = []
        for first in range(0, tokens, step):
            piece = slice(first, first + step)
            seen = count[piece, None]
            # Behind the last key it is copied again; a token without keys copies any.
            place = oldest[piece, None] + torch.minimum(within, seen - 1)
            place = place.masked_fill(seen == 0, 0)
            table = rows.block_table[row[piece]].long()
            block = table.gather(1, place // block_size).masked_fill(seen == 0, 0)
            own = _each_alone(count[piece], blocks, self.window)
            pieces.append((piece, block, place % block_size, own))
        return pieces


def _each_alone(count: Tensor, blocks: int, longest: int) -> Rows:
    """A row for each of some tokens, which has so many keys in so many blocks of its own."""
    token = torch.arange(len(count), dtype=torch.int32, device=count.device)
    return Rows(
        query_starts=token,
        query_lengths=(count > 0).int(),
        kv_lengths=count.int(),
        block_table=torch.arange(len(count) * blocks, dtype=torch.int32, device=count.device).view(
            -1, blocks
        ),
        max_query_length=1,
        max_kv_length=longest,
    )
