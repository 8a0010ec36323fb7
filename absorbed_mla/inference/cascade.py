"""Cascade attention: rows that begin with the same cached blocks attend to these together.

A group adds one row: all its tokens over the keys of the prefix. Its own rows have the keys behind
it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from absorbed_mla.inference.rows import Rows


class CascadeTables(NamedTuple):
    """The groups of a step, int32 on the device, [T] each; rows and groups use leading entries.

    Places reorder tokens so that those of a group are adjacent.

    Attributes:
        order: The token at each place; None: the one of its number.
        places: The place of each token; None likewise.
        starts: The place of each row's first token.
        skipped: Blocks of each row that its group attends to; 0 for a row in no group.
        group_starts: The place of each group's first token.
        group_lengths: Tokens of each group, 0 for what is no group.
        group_keys: Keys of each group's prefix.
        group_rows: A row of each group.
    """

    order: Tensor | None
    places: Tensor | None
    starts: Tensor
    skipped: Tensor
    group_starts: Tensor
    group_lengths: Tensor
    group_keys: Tensor
    group_rows: Tensor

    def by_place(self, x: Tensor) -> Tensor:
        """What tokens have, [T, ..], in the order of places."""
        return x if self.order is None else x.index_select(0, self.order)

    def by_token(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`by_place`."""
        return x if self.places is None else x.index_select(0, self.places)

    def rows(self, rows: Rows, block_size: int) -> Rows:
        """The groups over their prefixes, then all rows over the keys behind, by place.

        Args:
            rows: Of the step, by token.
            block_size: Tokens of a block.
        """
        table, count = rows.block_table, len(rows)
        starts, lengths, keys, members = (x[: max(count // 2, 1)] for x in self[4:])
        skipped = self.skipped[:count]
        column = torch.arange(table.shape[1], device=table.device) + skipped[:, None]
        own_table = table.gather(1, column.clamp(max=table.shape[1] - 1))
        return Rows(
            torch.cat((starts, self.starts[:count])),
            torch.cat((lengths, rows.query_lengths)),
            torch.cat((keys, rows.kv_lengths - skipped * block_size)),
            torch.cat((table.index_select(0, members), own_table)),
            max_query_length=len(self.starts),
            max_kv_length=rows.max_kv_length,
            prefixes=len(starts),
        )
