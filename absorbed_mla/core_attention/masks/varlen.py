"""Spans as calls of kernels for sequences of different lengths (``thd`` kernels)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from absorbed_mla.caching import DerivedTables
from absorbed_mla.core_attention.device_table import in_use, to_device
from absorbed_mla.core_attention.masks.spans import Span, Spans


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """One call of a kernel: spans in the same order on both axes, no two sharing a key.

    Between two spans there may be rows that belong to none, such as padding.

    Attributes:
        spans: In the order of both axes.
        causal: Whether the last query of a span sees all its keys, the one before it one key less,
            and so on (causal, aligned at the bottom right); otherwise every query sees all keys.
    """

    spans: tuple[Span, ...]
    causal: bool
    _tables: DerivedTables = field(default_factory=DerivedTables, init=False, repr=False)

    @functools.cached_property
    def queries(self) -> slice:
        """From the first query to the last, rows between spans included."""
        return slice(self.spans[0].query_start, self.spans[-1].query_end)

    @functools.cached_property
    def keys(self) -> slice:
        """From the first key to the last, rows between spans included."""
        return slice(self.spans[0].key_start, self.spans[-1].key_end)

    @functools.cached_property
    def num_keys(self) -> int:
        """Keys of all spans."""
        return sum(span.num_keys for span in self.spans)

    @functools.cached_property
    def is_contiguous(self) -> bool:
        """Whether no query lies between spans."""
        queries = self.queries
        return sum(s.num_queries for s in self.spans) == queries.stop - queries.start

    @functools.cached_property
    def is_square(self) -> bool:
        """Whether every span has as many queries as keys, so that both alignments are the same."""
        return all(span.num_queries == span.num_keys for span in self.spans)

    @functools.cached_property
    def longest(self) -> tuple[int, int]:
        """The largest number of queries, and of keys, in a span."""
        return max(s.num_queries for s in self.spans), max(s.num_keys for s in self.spans)

    def starts(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Padded ``cu_seqlens`` of queries and keys, and the real lengths of both; int32.

        Returns:
            [spans + 1] first query of each span, counted from the first query of the call, and one
            past the last; the same for keys; [spans] number of queries, and of keys.
        """

        def make() -> Tensor:
            first_query, first_key = self.queries.start, self.keys.start
            rows = [
                [
                    *(s.query_start - first_query for s in self.spans),
                    self.queries.stop - first_query,
                ],
                [*(s.key_start - first_key for s in self.spans), self.keys.stop - first_key],
                [s.num_queries for s in self.spans],
                [s.num_keys for s in self.spans],
            ]
            entries = [x for row in rows for x in row]
            return to_device(lambda: torch.tensor(entries, dtype=torch.int32), device)

        count = len(self.spans)
        table = in_use(self._tables.get(("starts", device), make))
        starts_q, starts_k, lengths_q, lengths_k = table.split([count + 1, count + 1, count, count])
        return starts_q, starts_k, lengths_q, lengths_k

    def cu_seqlens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``cu_seqlens`` of queries and keys, rows between spans not counted; int32 [spans + 1]."""

        def make() -> Tensor:
            rows = [
                [0, *accumulate(span.num_queries for span in self.spans)],
                [0, *accumulate(span.num_keys for span in self.spans)],
            ]
            return to_device(lambda: torch.tensor(rows, dtype=torch.int32), device)

        table = in_use(self._tables.get(("cu_seqlens", device), make))
        return table[0], table[1]

    def write_queries(self, total: Tensor, part: Tensor) -> None:
        """Write a kernel's result for this call's queries, leaving rows between spans unchanged.

        Kernels allocate the LSE themselves and write the rows of spans only, so that the others
        hold anything.

        Args:
            total: Result for all queries, which are its last axis.
            part: Result for the queries of this call, which are its last axis.
        """
        rows = total[..., self.queries]
        if self.is_contiguous:
            rows.copy_(part)
        else:
            rows.copy_(torch.where(self._in_spans(total.device), part, rows))

    def only_spans(self, values: Tensor, other: float) -> Tensor:
        """A kernel's ``values`` [S, B, N] for this call's queries, ``other`` between spans."""
        if self.is_contiguous:
            return values
        return torch.where(self._in_spans(values.device)[:, None, None], values, other)

    def _in_spans(self, device: torch.device) -> Tensor:
        """Bool: which of the call's queries are in a span."""

        def make() -> Tensor:
            first = self.queries.start
            inside = torch.zeros(self.queries.stop - first, dtype=torch.bool)
            for span in self.spans:
                inside[span.query_start - first : span.query_end - first] = True
            return inside

        return in_use(self._tables.get(("in_spans", device), lambda: to_device(make, device)))


def varlen_calls(spans: Spans, together: bool) -> tuple[VarlenCall, ...]:
    """As few calls as a first-fit search finds; together they hold what the spans see.

    Args:
        spans: Of one attention call.
        together: Whether one call may hold several spans. Kernels take several sequences only
            where the batch is 1.
    """
    return spans.tables.get(("varlen", together), lambda: _first_fit(spans, together))


def _first_fit(spans: Spans, together: bool) -> tuple[VarlenCall, ...]:
    groups: list[tuple[bool, list[Span]]] = []
    for span in _bottom_right_aligned(spans):
        causal = span.causal_offset is not None
        for group_causal, group in groups:
            last = group[-1]
            if (
                together
                and group_causal == causal
                and last.query_end <= span.query_start
                and last.key_end <= span.key_start
            ):
                group.append(span)
                break
        else:
            groups.append((causal, [span]))
    return tuple(VarlenCall(tuple(group), causal) for causal, group in groups)


def _bottom_right_aligned(spans: Spans) -> Iterator[Span]:
    """The same pairs, in spans without a mask or with a causal one aligned at the bottom right."""
    for span in spans:
        offset, keys, queries = span.causal_offset, span.num_keys, span.num_queries
        if queries == 1 and (offset is None or offset >= keys - 1):
            # Causal and unmasked at once: called causal, it fits into a call with causal spans.
            yield replace(span, causal_offset=keys - 1)
        elif offset is None or (offset >= keys - 1 and queries + offset > keys):
            yield replace(span, causal_offset=None)
        elif queries + offset <= keys:
            yield replace(span, key_end=span.key_start + queries + offset)
        else:
            # From this query on all keys are seen.
            full = span.query_start + keys - offset
            yield replace(span, query_end=full)
            yield replace(span, query_start=full, causal_offset=None)
