"""A cache that ranks share, computed in one process, one rank after the other."""

import functools

from torch import Tensor

from absorbed_mla.core_attention.merge import merge
from absorbed_mla.inference.backend import PagedBackend
from absorbed_mla.inference.decode_context_parallel.attention import DecodeContextParallelAttention
from absorbed_mla.inference.decode_context_parallel.layout import CacheShares


class RankAlone(CacheShares):
    """One of ``size`` ranks, which exchange nothing: it attends to its own keys."""

    parts = 1

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather_heads(self, x: Tensor) -> Tensor:
        return x

    def merge(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse


def share(cache: Tensor, rank: int, size: int) -> Tensor:
    """What a rank has of a cache [blocks, block_size, C + R]."""
    return cache[:, rank::size].contiguous()


def by_shares(
    backend: PagedBackend,
    size: int,
    q_content: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    rows,
    scale: float,
    heads: slice = slice(None),
) -> tuple[Tensor, Tensor]:
    """Attention over every rank's keys, merged from the first rank to the last, for some heads."""
    parts = []
    for rank in range(size):
        one = DecodeContextParallelAttention(backend, RankAlone(rank, size))
        out, lse = one.forward(q_content, q_rope, share(cache, rank, size), rows, scale)
        parts.append((out[:, heads].to(lse.dtype), lse[:, heads].contiguous()))
    return functools.reduce(lambda total, part: merge(*total, *part), parts)
