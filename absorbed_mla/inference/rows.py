"""The requests of one step: which tokens are whose, and where their latents lie in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from absorbed_mla.core_attention.device_table import to_device


@dataclass(frozen=True)
class Rows:
    """One row per request, as tables on the device. New tokens lie along one axis, packed.

    Token j of row r sees keys 0 .. kv_lengths[r] - query_lengths[r] + j of its request. Its key p
    is ``cache[block_table[r, p // block_size], p % block_size]``.

    Attributes:
        query_starts: First new token of each row on the token axis, int32 [R].
        query_lengths: New tokens of each row, 0 for a row that is padding, int32 [R].
        kv_lengths: Keys of each row, the new tokens' included, int32 [R].
        block_table: Blocks of the cache that hold each row's keys, in order; entries past the last
            one in use may be anything. int32 [R, blocks of the longest row].
        max_query_length: No row has more new tokens.
        max_kv_length: No row has more keys.
    """

    query_starts: Tensor
    query_lengths: Tensor
    kv_lengths: Tensor
    block_table: Tensor
    max_query_length: int
    max_kv_length: int

    def __len__(self) -> int:
        return len(self.query_starts)

    @classmethod
    def of(
        cls, query_lengths: Sequence[int], kv_lengths: Sequence[int], block_table: Tensor
    ) -> Rows:
        """Rows of known lengths, one after the other on the token axis."""
        device = block_table.device
        starts = [sum(query_lengths[:row]) for row in range(len(query_lengths))]
        numbers = [starts, list(query_lengths), list(kv_lengths)]
        table = to_device(lambda: torch.tensor(numbers, dtype=torch.int32), device)
        return cls(
            table[0],
            table[1],
            table[2],
            block_table,
            max_query_length=max(query_lengths, default=0),
            max_kv_length=max(kv_lengths, default=0),
        )
