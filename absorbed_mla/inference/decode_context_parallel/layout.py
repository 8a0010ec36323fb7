"""The layout of decode context parallelism: which rank keeps which tokens' latents.

Tensor-parallel ranks need the same latents, for different heads; context-parallel ranks, while they
generate, for the same heads. Here each keeps 1/ranks of them:

* The token at position p of its request belongs to rank p % ranks, so the shares of a request
  differ by one token at most, and a request shorter than that leaves ranks without any.
* A block of the host's (64 tokens, a multiple of the ranks) stays one block: every rank has a
  memory of all blocks, in which a block has 64 / ranks slots, and the token is in slot
  (p % 64) // ranks. Allocator, block table, prefix cache (hashes of whole blocks), chunked prefill
  and eviction deal with blocks and are the host's own.
* So a rank's share is a paged cache like any other: the same block table, smaller blocks, key
  p // ranks in place of p. A token at position p sees the keys of a rank below
  (p + ranks - rank) // ranks.
* Attention gathers the queries of all heads, attends with them to the rank's own keys, gives every
  rank its own heads back, and merges these by LSE in the order of ranks, whatever arrives first.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.core_attention.merge import merge
from absorbed_mla.inference.rows import Rows

Count = TypeVar("Count", int, Tensor)


class CacheShares:
    """The ranks that share the latents of every request.

    Args:
        group: All of them: tensor-parallel ones, or several times these under context parallelism.
        heads: This rank's tensor-parallel group; None: ``group``. Rank i of either has part
            i % ``parts`` of the heads.

    Attributes:
        size: Number of ranks.
        rank: This one's number.
        parts: Number of parts that the heads are in.
        copies: How many ranks have the same heads.
    """

    def __init__(self, group: dist.ProcessGroup, heads: dist.ProcessGroup | None = None) -> None:
        self.group, self.heads = group, heads or group
        self.size, self.rank = group.size(), group.rank()
        self.parts = self.heads.size()
        self.copies = self.size // self.parts
        assert self.heads.rank() == self.rank % self.parts, "tensor-parallel ranks are neighbours"

    def count(self, tokens: Count) -> Count:
        """How many of a request's first ``tokens`` tokens this rank keeps."""
        return (tokens + (self.size - 1 - self.rank)) // self.size

    def places(self, block: Tensor, position: Tensor, unused: int) -> tuple[Tensor, Tensor]:
        """Where this rank writes tokens: block and slot.

        Args:
            block: Of each token, [T].
            position: In the block of the host, [T].
            unused: A block that nobody reads: tokens of other ranks go there, because a CUDA graph
                must write equally many on every rank.
        """
        own = position % self.size == self.rank
        return torch.where(own, block, unused), position // self.size

    def rows(self, rows: Rows) -> Rows:
        """The rows of one new token over this rank's keys."""
        assert rows.max_query_length == 1, "the keys of a rank that several tokens see differ"
        longest = -(-rows.max_kv_length // self.size)
        return replace(rows, kv_lengths=self.count(rows.kv_lengths), max_kv_length=longest)

    def gather(self, x: Tensor) -> Tensor:
        """``x`` of every rank, [K, ...] to [ranks, K, ...]."""
        return _gather(x, self.group)

    def gather_heads(self, x: Tensor) -> Tensor:
        """[T, N, W] of this rank's heads to [T, N * parts, W] of all."""
        return _gather(x, self.heads).transpose(0, 1).flatten(1, 2)

    def merge(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over the keys of all ranks, from that over each rank's own.

        Args:
            out: Of all heads over this rank's keys, [T, N * parts, C].
            lse: Likewise, [T, N * parts], fp32 (fp64).

        Returns:
            Of this rank's heads over all keys, [T, N, C] and [T, N], both in the dtype of ``lse``.
        """
        tokens, heads, width = out.shape
        # One message: the LSE lies behind the output, as numbers of the output's dtype.
        bits = lse.contiguous().unsqueeze(-1).view(out.dtype)
        shape = tokens, heads // self.parts, width + bits.shape[-1]
        sent = out.new_empty(self.size, *shape)
        of_ranks = sent.view(self.copies, self.parts, *shape)
        of_ranks[..., :width] = out.unflatten(1, (self.parts, -1)).transpose(0, 1)
        of_ranks[..., width:] = bits.unflatten(1, (self.parts, -1)).transpose(0, 1)
        found = torch.empty_like(sent)
        dist.all_to_all_single(_bytes(found), _bytes(sent), group=self.group)
        parts = ((part[..., :width], part[..., width:].contiguous()) for part in found)
        merged = ((part.to(lse.dtype), bits.view(lse.dtype)[..., 0]) for part, bits in parts)
        return functools.reduce(lambda total, part: merge(*total, *part), merged)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(found, x.contiguous(), group=group)
    return found.unflatten(0, (group.size(), len(x)))


def _bytes(x: Tensor) -> Tensor:
    """Its memory: all process groups exchange bytes, and not all exchange bf16."""
    return x.view(torch.uint8)
