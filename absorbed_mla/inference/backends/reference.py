"""Absorbed attention over a paged latent cache in plain PyTorch: what kernels are tested against.

It is batch-invariant: every token has matrix products of its own, of one shape, over tiles of keys
in their order, and keys that it does not see add exact zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from absorbed_mla.core_attention.tiled_reference import CHUNK_TOKENS, TILE_KEYS, attend_to_tiles
from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.inference.backend import PagedRequest, Rates
from absorbed_mla.inference.rows import Rows


def paged_reference(
    q_content: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    rows: Rows,
    scale: float,
    key_start: int = 0,
    key_end: int | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens over the cached latents of their rows, without autograd.

    Token j of row r sees key p exactly where p <= kv_lengths[r] - query_lengths[r] + j, or, in a
    prefix, p < kv_lengths[r], and key_start <= p < key_end. Arithmetic is fp32 (fp64 for fp64
    inputs).

    Args:
        q_content: Absorbed query [T, N, C].
        q_rope: [T, N, R], rotated; R may be 0.
        cache: [blocks, block_size, C + R]; it holds the keys from ``key_start`` on, so key p lies
            in block_table[r, (p - key_start) // block_size] at (p - key_start) % block_size. Or
            rows of ``Fp8Latents``, which are read in the dtype of the query.
        rows: Which tokens are whose, and where their keys are.
        scale: Multiplies the scores.
        key_start: First key that is seen.
        key_end: One past the last key that is seen; None: no bound.
        batch_invariant: Changes nothing: the result always is.

    Returns:
        Output [T, N, C] in the dtype of ``q_content`` and natural-log LSE [T, N] in fp32 (fp64).
        A token that is in no row or sees no key gets 0 and -inf, whatever its query holds.
    """
    compute = torch.promote_types(q_content.dtype, torch.float32)
    out = torch.empty_like(q_content, memory_format=torch.contiguous_format)
    lse = q_content.new_empty(q_content.shape[:2], dtype=compute)
    parts = rows.split() if rows.prefixes else (rows,)
    each = [(part, *last_keys(part, len(q_content), key_start, key_end)) for part in parts]
    seeing = torch.stack([last >= 0 for *_, last in each]).any(0)
    decode = _decoder(cache, q_content, q_rope)
    for first in range(0, len(q_content), CHUNK_TOKENS):
        chunk = slice(first, first + CHUNK_TOKENS)
        query = torch.cat((q_content[chunk], q_rope[chunk]), dim=-1).to(compute)
        # Padding may hold NaN, which times 0 is NaN.
        query = query.masked_fill(~seeing[chunk, None, None], 0.0)
        tiles = []
        for part, row, last in each:
            table = part.block_table[row[chunk]].long()
            keys = _Keys(cache, decode, table, last[chunk], rows.max_kv_length - key_start)
            tiles.append(map(keys.tile, keys.tiles))
        out[chunk], lse[chunk], _ = attend_to_tiles(
            query, chain(*tiles), scale, q_content.shape[-1]
        )
    return out, lse


def _decoder(cache: Tensor, q_content: Tensor, q_rope: Tensor) -> Callable[[Tensor], Tensor]:
    """Makes [latent | k_rope] of cached rows."""
    if cache.dtype != torch.uint8:
        return lambda rows: rows
    latents = Fp8Latents(q_content.shape[-1], q_rope.shape[-1])
    return lambda rows: latents.decode(rows, q_content.dtype)


class _Keys:
    """The keys of some tokens, a tile at a time, counted from the first one in the cache.

    Args:
        cache: [blocks, block_size, C + R], or rows that ``decode`` makes such of.
        decode: Makes [latent | k_rope] of rows.
        table: Block table of each token's row, int64 [T, blocks].
        last: Last key that each token sees, -1 for none, [T].
        max_keys: No token sees more keys.
    """

    def __init__(
        self,
        cache: Tensor,
        decode: Callable[[Tensor], Tensor],
        table: Tensor,
        last: Tensor,
        max_keys: int,
    ) -> None:
        self.cache, self.decode, self.table, self.last = cache, decode, table, last
        if last.device.type == "cpu":  # reading a number does not wait: tables may be far too wide
            max_keys = min(max_keys, int(last.max()) + 1)
        self.tiles = range(0, max_keys, TILE_KEYS) if cache.numel() and table.shape[1] else range(0)

    def tile(self, start: int) -> tuple[Tensor, Tensor]:
        """Cached keys [T, tile, C + R], 0 where unseen, and which are seen, bool [T, tile]."""
        key = torch.arange(start, start + TILE_KEYS, device=self.last.device)
        seen = key <= self.last[:, None]
        block_size = self.cache.shape[1]
        column = (key // block_size).clamp(max=self.table.shape[1] - 1)
        # Unseen entries of the table may be anything.
        block = self.table[:, column].masked_fill(~seen, 0)
        keys = self.decode(self.cache[block, key % block_size])
        return keys.masked_fill(~seen[..., None], 0.0), seen


def last_keys(
    rows: Rows, tokens: int, key_start: int = 0, key_end: int | None = None
) -> tuple[Tensor, Tensor]:
    """Row of each token and the last key that it sees, counted from ``key_start``; -1 for none.

    Rows are all prefixes, or none is.
    """
    assert rows.prefixes in (0, len(rows.query_starts)), "a token is in one row"
    token = torch.arange(tokens, device=rows.query_starts.device)[:, None]
    index = token - rows.query_starts
    member = (index >= 0) & (index < rows.query_lengths)  # [T, Q]
    row = member.to(torch.uint8).argmax(1)
    ends = rows.kv_lengths - (1 if rows.prefixes else rows.query_lengths - index)
    last = ends.expand_as(index).gather(1, row[:, None])[:, 0]
    if key_end is not None:
        last = last.clamp(max=key_end - 1)
    return row, (last - key_start).masked_fill(~member.any(1), -1).clamp(min=-1)


class PagedReference:
    """See :class:`~absorbed_mla.inference.backend.PagedBackend`; always batch-invariant."""

    name = "reference"
    summary = "plain PyTorch: any device, dtype and block size"
    forms = ("absorbed",)
    rates: ClassVar[Rates] = {
        "NVIDIA H200": (15.0, 15.0),
        "gpu": (0.05, 0.05),
    }
    forward = staticmethod(paged_reference)

    def why_not(self, request: PagedRequest) -> None:
        """It can do everything."""


ENTRY = PagedReference()
