"""The row groups of a step: tokens that attend in the absorbed form, and in the expanded form."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from absorbed_mla.core_attention.cost import Rated, Work, seconds
from absorbed_mla.dims import MLADims
from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import RowLengths


@dataclass(frozen=True)
class Segment:
    """Neighbouring rows that run in one form.

    Attributes:
        form: ``"absorbed"`` or ``"expanded"``.
        rows: Which rows of the step.
        tokens: Their new tokens on the token axis.
    """

    form: str
    rows: slice
    tokens: slice


# All rows and tokens of a step; also where their lengths are not known on the host.
ALL_ABSORBED = Segment("absorbed", slice(None), slice(None))


def is_cheaper_expanded(
    dims: MLADims, absorbed: Rated, expanded: Rated, machine: str, lengths: tuple[int, int]
) -> bool:
    """Whether a row takes less time expanded than absorbed, by the cost model.

    Args:
        dims: Of the layer on this rank.
        absorbed: Backend of the absorbed form.
        expanded: Backend of the expanded form.
        machine: See ``cost.seconds``.
        lengths: New tokens and keys of the row.
    """
    queries, keys = lengths
    pairs = queries * keys - queries * (queries - 1) // 2
    work = Work(query_tokens=queries, key_tokens=keys, pairs=pairs, training=False)
    return seconds("expanded", expanded, dims, work, machine) < seconds(
        "absorbed", absorbed, dims, work, machine
    )


def segments(
    lengths: RowLengths, expands: Callable[[tuple[int, int]], bool]
) -> tuple[Segment, ...]:
    """Group neighbouring rows of one form.

    Rows with one new token run absorbed: to project all keys for one query saves nothing.

    Args:
        lengths: Of all rows.
        expands: Whether a row of (new tokens, keys), more than one of both, runs expanded.
    """
    each = zip(lengths.queries, lengths.keys)
    expanded = [queries > 1 and expands((queries, keys)) for queries, keys in each]
    runs, row, token = [], 0, 0
    for form, group in itertools.groupby(expanded):
        end = row + len(list(group))
        last = token + sum(lengths.queries[row:end])
        name = "expanded" if form else "absorbed"
        runs.append(Segment(name, slice(row, end), slice(token, last)))
        row, token = end, last
    return tuple(runs)


def rows_of(rows: Rows, segment: Segment, lengths: RowLengths) -> Rows:
    """The segment's rows, on its own token axis."""
    chosen, first = segment.rows, segment.tokens.start
    if chosen == slice(0, len(rows)):
        return rows
    starts = rows.query_starts[chosen]
    return Rows(
        query_starts=starts - first if first else starts,
        query_lengths=rows.query_lengths[chosen],
        kv_lengths=rows.kv_lengths[chosen],
        block_table=rows.block_table[chosen],
        max_query_length=max(lengths.queries[chosen]),
        max_kv_length=max(lengths.keys[chosen]),
    )
