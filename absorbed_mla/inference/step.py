"""One forward over cached latents, as the attention sees it, from whichever context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from absorbed_mla.inference.rows import Rows


@dataclass(frozen=True)
class CachePart:
    """The keys of all rows at positions ``start`` to ``end``, on the device.

    Attributes:
        cache: [latent | k_rope] in blocks, [blocks, block_size, C + rope].
        rows: Their block table begins with the block that holds position ``start``.
        start: First position.
        end: One past the last; None: there are no more.
    """

    cache: Tensor
    rows: Rows
    start: int = 0
    end: int | None = None

    def gather(self, row: int, start: int, end: int, out: Tensor) -> None:
        """Copy a row's keys at positions ``start`` to ``end`` to ``out`` [.., C + rope]."""
        blocks = self.rows.block_table[row]
        start, end = start - self.start, end - self.start
        if out.is_cuda:
            # Loaded where it runs: elsewhere the package does without Triton.
            from absorbed_mla.kernels.paged.gather import gather

            gather(self.cache, blocks, start, end, out)
            return
        positions = torch.arange(start, end)
        block_size = self.cache.shape[1]
        found = blocks.long()[positions // block_size]
        out.copy_(self.cache[found, positions % block_size])


class BatchPart(CachePart):
    """Of a batch whose requests are a block each: block r is row r's."""

    def gather(self, row: int, start: int, end: int, out: Tensor) -> None:
        """See :class:`CachePart`."""
        out.copy_(self.cache[row, start - self.start : end - self.start])


@dataclass(frozen=True)
class RowLengths:
    """The lengths in :class:`Rows` as integers of the host.

    Attributes:
        queries: New tokens of each row.
        keys: Keys of each row, the new tokens' included.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]


class InferenceStep(Protocol):
    """What a forward does with the cache of one layer.

    Attributes:
        max_position: One more than the largest position that a token may have.
        block_size: Tokens in a block of every part's cache.
        windowed: Whether there may be several parts.
    """

    max_position: int
    block_size: int
    windowed: bool

    @property
    def rows(self) -> Rows:
        """The requests; tokens of one request are neighbours on the token axis."""
        ...

    @property
    def lengths(self) -> RowLengths | None:
        """Of the rows; None while a CUDA graph is captured, which must serve any."""
        ...

    def positions(self) -> Tensor | slice:
        """Position of each new token in its request, int64 [T], or all of them as a slice."""
        ...

    def pack(self, x: Tensor) -> Tensor:
        """Tokens of ``x`` [S, B, D], as the host gives them, on one axis: [T, 1, D]."""
        ...

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        ...

    def write(self, kv: Tensor) -> None:
        """Append the latents of the new tokens, [latent | k_rope] [T, 1, C + rope]."""
        ...

    def parts(self, end: int | None = None) -> Iterator[CachePart]:
        """The keys in order of position, the new tokens' included, at least those below ``end``.

        A part lives until the next is asked for.
        """
        ...
