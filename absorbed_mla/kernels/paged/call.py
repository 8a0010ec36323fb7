"""The arguments of attention over a paged cache, which all its kernels take alike."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from absorbed_mla.kernels.paged.plan import window_of


class PagedCall(NamedTuple):
    """Queries of new tokens, the paged cache of their requests, and how keys are read.

    Attributes:
        q_content: [T, N, C], bf16, fp16 or fp32; C a power of two, at least 16.
        q_rope: [T, N, R]; R likewise, or 0.
        cache: [blocks, block_size, C + R]; any strides of blocks and slots. Or FP8 rows, uint8
            [blocks, block_size, width] as ``fp8_latents.Fp8Latents`` has them, with strides that
            are multiples of 16.
        query_starts: As in ``inference.rows.Rows``, like the next five; int32 [Q].
        query_lengths: Int32 [Q].
        kv_lengths: Int32 [Q].
        block_table: Int32 or int64 [Q, blocks of a request].
        max_query_length: Maximum new tokens of a request.
        max_kv_length: Maximum keys of a request.
        scale: Multiplies the scores.
        key_start: First key in the cache.
        key_end: One past the last key that is seen, or None.
        batch_invariant: A token's result depends on its query and keys only, and has the bits of
            training.
        num_splits: Splits of the keys of every request; None: the device chooses.
        prefixes: As in ``Rows``; 0 with ``batch_invariant``.
    """

    q_content: Tensor
    q_rope: Tensor
    cache: Tensor
    query_starts: Tensor
    query_lengths: Tensor
    kv_lengths: Tensor
    block_table: Tensor
    max_query_length: int
    max_kv_length: int
    scale: float
    key_start: int = 0
    key_end: int | None = None
    batch_invariant: bool = False
    num_splits: int | None = None
    prefixes: int = 0

    @property
    def lengths(self) -> tuple[Tensor, Tensor, Tensor]:
        """First new token, new tokens, and keys of every request."""
        return self.query_starts, self.query_lengths, self.kv_lengths

    @property
    def row_tokens(self) -> int:
        """Maximum tokens of all rows: those in prefixes are in other rows, too."""
        return len(self.q_content) * (2 if self.prefixes else 1)

    @property
    def requests(self) -> int:
        """Q."""
        return len(self.query_starts)

    @property
    def window(self) -> int:
        """Keys in the cache that a token may see, at most."""
        return window_of(self.max_kv_length, self.key_start, self.key_end)

    @property
    def has_keys(self) -> bool:
        """Whether there may be a token that sees a key."""
        tables = self.requests and self.cache.numel() and self.block_table.numel()
        return bool(tables and self.max_query_length and self.window)

    def results(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Memory for output and LSE of so many tokens."""
        shape = tokens, *self.q_content.shape[1:]
        lse = self.q_content.new_empty(shape[:2], dtype=torch.float32)
        return self.q_content.new_empty(shape), lse

    @property
    def fp8(self) -> bool:
        """Whether the cache has FP8 rows."""
        return self.cache.dtype == torch.uint8
