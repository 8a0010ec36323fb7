"""Decode context parallelism's attention: each rank over its share of the cache, merged by LSE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from absorbed_mla.inference.backend import PagedBackend
from absorbed_mla.inference.backends.reference import last_keys
from absorbed_mla.inference.decode_context_parallel.layout import CacheShares
from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import CachePart

# New tokens times heads of all ranks in one exchange, where requests have several: 72 MiB of
# queries at DeepSeek-V3's widths in bf16, and as much again of outputs, sent and received.
_TOKEN_HEADS = 2**16


class DecodeContextParallelAttention:
    """A paged backend over the keys of all ranks. Collective: every rank has the same rows.

    Args:
        backend: Runs with the heads of all ranks, over this rank's keys.
    """

    def __init__(self, backend: PagedBackend, ranks: CacheShares) -> None:
        self.backend, self.ranks = backend, ranks

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
        """See ``backends.reference.paged_reference``.

        Args:
            q_content: [T, N, C] of this rank's heads.
            q_rope: [T, N, R].
            cache: This rank's share, [blocks, block_size / ranks, C + R].
            rows: Over the keys of all ranks.
            scale: Multiplies the scores.
            key_start: 0.
            key_end: None.
            batch_invariant: False: sums over parts of the keys are not those of training.

        Returns:
            Output [T, N, C] and LSE [T, N] over all keys, both in fp32 (fp64).
        """
        assert (key_start, key_end, batch_invariant) == (0, None, False)
        content = q_content.shape[-1]
        query = torch.cat((q_content, q_rope), dim=-1)
        found = []
        for tokens, own in self._pieces(rows, *query.shape[:2]):
            heads = self.ranks.gather_heads(query[tokens])
            part = heads[..., :content], heads[..., content:]
            found.append(self.ranks.merge(*self.backend.forward(*part, cache, own, scale)))
        if len(found) == 1:
            return found[0]
        out, lse = zip(*found)
        return torch.cat(out), torch.cat(lse)

    def _pieces(self, rows: Rows, tokens: int, heads: int) -> Iterator[tuple[slice, Rows]]:
        """Tokens that are computed together, and their rows over this rank's keys."""
        if rows.max_query_length == 1:
            yield slice(None), self.ranks.rows(rows)
            return
        step = max(1, _TOKEN_HEADS // (heads * self.ranks.parts))
        row, last = last_keys(rows, tokens)
        for first in range(0, tokens, step):
            piece = slice(first, first + step)
            yield piece, self.ranks.rows(_one_by_one(rows, row[piece], last[piece]))


def _one_by_one(rows: Rows, row: Tensor, last: Tensor) -> Rows:
    """A row for each token: two neighbours may see equally many keys of a rank.

    ``row`` is that of each token, and ``last`` the last key that it sees, -1 for none, [T].
    """
    return Rows(
        query_starts=torch.arange(len(row), dtype=torch.int32, device=row.device),
        query_lengths=(last >= 0).int(),
        kv_lengths=(last + 1).int(),
        block_table=rows.block_table[row],
        max_query_length=1,
        max_kv_length=rows.max_kv_length,
    )


@dataclass(frozen=True)
class SharedCachePart(CachePart):
    """This rank's share of the keys of all rows; positions are those of all ranks.

    Attributes:
        ranks: Share the cache.
    """

    ranks: CacheShares = field(kw_only=True)

    def gather(self, row: int, start: int, end: int, out: Tensor) -> None:
        """See :class:`CachePart`; collective, with as much memory again as ``out``."""
        ranks = self.ranks
        first, last = ranks.count(start), ranks.count(end)
        own = out.new_empty(-(-(end - start) // ranks.size), out.shape[-1])
        super().gather(row, first, last, own[: last - first])
        # Position ``start`` is the first one of rank start % size, the next one of the rank after.
        found = ranks.gather(own).roll(-(start % ranks.size), dims=0)
        out.copy_(found.transpose(0, 1).flatten(0, 1)[: end - start])
