"""The paged metadata of a step: new tokens of each request, and the blocks of its latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from absorbed_mla.caching import DerivedTables
from absorbed_mla.core_attention.device_table import to_device


@dataclass(frozen=True)
class Rows:
    """One row per request (Q rows), as tables on the device; new tokens are packed on one axis.

    Token j of row r sees keys 0 .. kv_lengths[r] - query_lengths[r] + j of its request, or all its
    kv_lengths[r] keys where r < prefixes. Its key p is
    ``cache[block_table[r, p // block_size], p % block_size]``. A token may be in a prefix and in
    another row: then it attends to the keys of both.

    Attributes:
        query_starts: First new token of each row on the token axis, int32 [Q].
        query_lengths: New tokens of each row, 0 for a row that is padding, int32 [Q].
        kv_lengths: Keys of each row, the new tokens' included, int32 [Q].
        block_table: Blocks of the cache that hold each row's keys, in order; entries after the last
            used one may be anything. int32 [Q, blocks of the longest row].
        max_query_length: Upper bound of the new tokens of a row.
        max_kv_length: Upper bound of the keys of a row.
        prefixes: Rows, the first ones, whose tokens see all their keys.
        tables: What kernels derive from these; all layers that have the same rows share it.
    """

    query_starts: Tensor
    query_lengths: Tensor
    kv_lengths: Tensor
    block_table: Tensor
    max_query_length: int
    max_kv_length: int
    prefixes: int = 0
    tables: DerivedTables = field(
        default_factory=DerivedTables, init=False, repr=False, compare=False
    )

    def __len__(self) -> int:
        return len(self.query_starts)

    def split(self) -> tuple[Rows, ...]:
        """Prefixes, and the other rows if there are any."""

        def some(rows: slice, prefixes: int) -> Rows:
            names = "query_starts", "query_lengths", "kv_lengths", "block_table"
            tables = {name: getattr(self, name)[rows] for name in names}
            return replace(self, **tables, prefixes=prefixes)

        others = (some(slice(self.prefixes, None), 0),) if self.prefixes < len(self) else ()
        return some(slice(self.prefixes), self.prefixes), *others

    @classmethod
    def of(
        cls, query_lengths: Sequence[int], kv_lengths: Sequence[int], block_table: Tensor
    ) -> Rows:
        """Rows of known lengths, one after the other on the token axis."""
        device = block_table.device
        starts = [0, *accumulate(query_lengths)][: len(query_lengths)]
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
