"""Cascade attention: rows that begin with the same cached blocks attend to these together.

A group of such rows is one row of a first call, whose tokens all see all keys of the prefix. In a
second call each row sees the keys behind its prefix. Both are merged by LSE.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from absorbed_mla.inference.rows import Rows


class CascadeTables(NamedTuple):
    """The groups of a step, int32 on the device, [T] each, of which rows and groups use the first.

    Tokens take places in which those of a group are neighbours.

    Attributes:
        order: The token at each place.
        places: The place of each token.
        starts: The place of each row's first token.
        skipped: Blocks of each row that its group attends to; 0 for a row in no group.
        group_starts: The place of each group's first token.
        group_lengths: Tokens of each group, 0 for what is no group.
        group_keys: Keys of each group's prefix.
        group_rows: A row of each group.
    """

    order: Tensor
    places: Tensor
    starts: Tensor
    skipped: Tensor
    group_starts: Tensor
    group_lengths: Tensor
    group_keys: Tensor
    group_rows: Tensor

    def rows(self, rows: Rows, block_size: int) -> tuple[Rows, Rows]:
        """The groups over their prefixes, and all rows over the keys behind, both by place.

        Args:
            rows: Of the step, by token.
            block_size: Tokens of a block.
        """
        table, count = rows.block_table, len(rows)
        groups = [x[: max(count // 2, 1)] for x in self[4:]]
        prefixes = Rows(
            *groups[:3],
            table.index_select(0, groups[3]),
            max_query_length=len(self.order),
            max_kv_length=rows.max_kv_length,
            causal=False,
        )
        skipped = self.skipped[:count]
        column = torch.arange(table.shape[1], device=table.device) + skipped[:, None]
        own = Rows(
            self.starts[:count],
            rows.query_lengths,
            rows.kv_lengths - skipped * block_size,
            table.gather(1, column.clamp(max=table.shape[1] - 1)),
            max_query_length=rows.max_query_length,
            max_kv_length=rows.max_kv_length,
        )
        return prefixes, own
