"""Cascade attention: rows that begin with the same cached blocks attend to these together.

A group of such rows is one row of a first call, whose tokens all see all keys of the prefix. In a
second call each row sees the keys behind its prefix. Both are merged by LSE.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from absorbed_mla.core_attention.merge import merge_into
from absorbed_mla.inference.backend import PagedBackend
from absorbed_mla.inference.rows import Rows


class CascadeTables(NamedTuple):
    """The groups of a step, int32 on the device, [T] each, of which rows and groups use the first.

    Tokens take places in which those of a group are neighbours.

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
            max_query_length=len(self.starts),
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


def attend_to_both(
    backend: PagedBackend,
    q_content: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    rows: tuple[Rows, Rows],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output and LSE over the keys of groups and those of rows, by place; see ``PagedBackend``.

    ``rows`` are what :meth:`CascadeTables.rows` gives.
    """
    prefixes, own = (backend.forward(q_content, q_rope, cache, each, scale) for each in rows)
    out, lse = (torch.empty_like(x) for x in own)
    # It merges [S, B, N, V].
    result, *parts = (tuple(x.unsqueeze(1) for x in one) for one in ((out, lse), prefixes, own))
    merge_into(*result, *parts)
    return out, lse
