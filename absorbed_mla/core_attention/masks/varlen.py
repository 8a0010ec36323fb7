"""Grouping spans into calls of a kernel for sequences of different lengths."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from absorbed_mla.core_attention.by_identity import cached_by_identity
from absorbed_mla.core_attention.device_table import in_use, to_device
from absorbed_mla.core_attention.masks.spans import Span


@dataclass(frozen=True, eq=False)
class Wave:
    """Spans that follow each other on both axes, none sharing a key with another: one call.

    Attributes:
        spans: In the order of both axes.
        causal: Whether the last query of a span sees all its keys, the one before it one key less,
            and so on (causal, aligned at the bottom right); otherwise every query sees all keys.
    """

    spans: tuple[Span, ...]
    causal: bool

    @property
    def queries(self) -> slice:
        """From the first query to the last, with what lies between spans."""
        return slice(self.spans[0].query_start, self.spans[-1].query_end)

    @property
    def keys(self) -> slice:
        """From the first key to the last, with what lies between spans."""
        return slice(self.spans[0].key_start, self.spans[-1].key_end)

    @functools.cached_property
    def num_keys(self) -> int:
        """Keys of all spans."""
        return sum(span.key_end - span.key_start for span in self.spans)

    @functools.cached_property
    def longest(self) -> tuple[int, int]:
        """The largest number of queries, and of keys, in a span."""
        queries = max(span.query_end - span.query_start for span in self.spans)
        return queries, max(span.key_end - span.key_start for span in self.spans)


def boundaries(wave: Wave, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """int32 on ``device``: [spans + 1] starts of queries and of keys, [spans] counts of both.

    Starts count from the first query and key of the wave. What lies between the end of a span and
    the start of the next one belongs to none.
    """
    cu_seqlens_q, cu_seqlens_k, used_q, used_k = _boundaries(wave, device)
    in_use(cu_seqlens_q)  # all four are views of one
    return cu_seqlens_q, cu_seqlens_k, used_q, used_k


@cached_by_identity(maxsize=256)
def _boundaries(wave: Wave, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spans, first_query, first_key = wave.spans, wave.queries.start, wave.keys.start
    rows = [
        [*(s.query_start - first_query for s in spans), wave.queries.stop - first_query],
        [*(s.key_start - first_key for s in spans), wave.keys.stop - first_key],
        [s.query_end - s.query_start for s in spans],
        [s.key_end - s.key_start for s in spans],
    ]
    entries = [x for row in rows for x in row]
    flat = to_device(lambda: torch.tensor(entries, dtype=torch.int32), device)
    cu_seqlens_q, cu_seqlens_k, used_q, used_k = flat.split([len(row) for row in rows])
    return cu_seqlens_q, cu_seqlens_k, used_q, used_k


@cached_by_identity(maxsize=1024)
def waves(spans: tuple[Span, ...], together: bool) -> tuple[Wave, ...]:
    """As few waves as a first-fit search finds; together they hold what the spans see.

    Args:
        spans: Of one call of the attention.
        together: Whether a wave may hold several: kernels take no batch of them.
    """
    groups: list[tuple[bool, list[Span]]] = []
    for span in _aligned(spans):
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
    return tuple(Wave(tuple(group), causal) for causal, group in groups)


@cached_by_identity(maxsize=1024)
def covers(spans: tuple[Span, ...], num_queries: int) -> bool:
    """Whether every query is in a span."""
    return sum(span.query_end - span.query_start for span in spans) == num_queries


def _aligned(spans: tuple[Span, ...]) -> Iterator[Span]:
    """The same pairs in spans that see all keys or are causal, aligned at the bottom right."""
    for span in spans:
        offset, keys = span.causal_offset, span.key_end - span.key_start
        queries = span.query_end - span.query_start
        if queries == 1 and (offset is None or offset >= keys - 1):
            # Both; so it keeps causal spans company.
            yield replace(span, causal_offset=keys - 1)
        elif offset is None or (offset >= keys - 1 and queries + offset > keys):
            yield replace(span, causal_offset=None)
        elif queries + offset <= keys:
            yield replace(span, key_end=span.key_start + queries + offset)
        else:
            # Queries from here on see all keys.
            full = span.query_start + keys - offset
            yield replace(span, query_end=full)
            yield replace(span, query_start=full, causal_offset=None)
