"""Key lists of a paged cache: positions of tokens' requests become slots, which are counted.

One launch does what a decode step otherwise spends a dozen on: it finds the row of every token,
looks the blocks of its chosen positions up, and counts the slots of every split.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.dsa.key_lists import KeyLists, key_lists, last_and_hole, smaller

# Rows that a program compares its token with at a time.
_ROWS = 128


class Places(NamedTuple):
    """Where positions of requests are in memory: in which slots of a key axis.

    Attributes:
        query_starts: As in ``inference.rows.Rows``, like the next two; int32 [Q].
        query_lengths: Int32 [Q].
        block_table: Int32 or int64 [Q, blocks of a request], any strides.
        block_size: Positions of a block.
        of_block: Slots from a block to the next.
        of_position: Slots from a position of a block to the next.
    """

    query_starts: Tensor
    query_lengths: Tensor
    block_table: Tensor
    block_size: int
    of_block: int
    of_position: int


def cached_lists(
    chosen: Tensor, places: Places, num_keys: int, tokens: int, splits: int = 1
) -> KeyLists:
    """As ``key_lists``, of positions in place of keys.

    Args:
        chosen: Positions in the token's request, int32 [T, topk], none twice; negative for none,
            anywhere. A token in no row has none, whatever is there.
        places: Of the positions.
        num_keys: Slots.
        tokens: Of a tile: 1, 2 or 4.
        splits: As in ``key_lists``.
    """
    chosen = chosen.contiguous()
    queries, topk = chosen.shape
    entries = chosen.new_empty(queries, splits, topk // splits)
    counts, open_counts = chosen.new_empty(2, queries, splits)
    if not entries.numel():
        return key_lists(entries, num_keys, tokens)
    starts, lengths, table, *sizes = places
    _slots_kernel[(queries, splits)](
        chosen,
        starts.contiguous(),
        lengths.contiguous(),
        table,
        entries,
        counts,
        open_counts,
        len(starts),
        topk // splits,
        *table.shape[1:],
        *table.stride(),
        *sizes,
        BLOCK=triton.next_power_of_2(topk // splits),
        ROWS=_ROWS,
        num_warps=4,
    )
    if tokens > 1:
        return key_lists(entries, num_keys, tokens)
    return KeyLists(entries, counts, open_counts, tokens)


@triton.jit(do_not_specialize=["requests", "columns", "table_row"])
def _slots_kernel(
    chosen_ptr,
    starts_ptr,
    lengths_ptr,
    table_ptr,
    entries_ptr,
    counts_ptr,
    open_counts_ptr,
    requests,
    length,
    columns,
    table_row,
    table_column,
    block_size,
    of_block,
    of_position,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A split of a token's positions."""
    token = tl.program_id(0)
    number = token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    place = tl.arange(0, BLOCK)
    position = tl.load(chosen_ptr + number * length + place, mask=place < length, other=-1)
    # The first row that has the token, as in ``last_keys``.
    row = requests
    for first in range(0, requests, ROWS):
        index = first + tl.arange(0, ROWS)
        start = tl.load(starts_ptr + index, mask=index < requests, other=0)
        new = tl.load(lengths_ptr + index, mask=index < requests, other=0)
        member = (token >= start) & (token < start + new)
        found = tl.reduce(tl.where(member, index, requests), 0, smaller)
        row = tl.where(found < row, found, row)
    there = (position >= 0) & (row < requests)
    known = tl.where(there, position, 0)
    # A row of the table is as long as the longest request; what lies behind is not read.
    column = tl.minimum(known // block_size, columns - 1).to(tl.int64)
    pointers = table_ptr + row.to(tl.int64) * table_row + column * table_column
    block = tl.load(pointers, mask=there, other=0).to(tl.int32)
    slot = tl.where(there, block * of_block + known % block_size * of_position, -1)
    tl.store(entries_ptr + number * length + place, slot, mask=place < length)
    last, hole = last_and_hole(slot, place, length)
    tl.store(counts_ptr + number, last)
    tl.store(open_counts_ptr + number, hole)
