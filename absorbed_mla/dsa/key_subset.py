"""Key subsets of a chunk of queries: the top-k keys chosen for it, or all that it sees.

A subset is a few queries and P keys for each; what is computed with it never holds more than a
chunk of scores. All of it is plain PyTorch, without autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Span, Spans

_Chunk = TypeVar("_Chunk")
# Numbers in the largest tensors of a chunk: 64 MiB in fp32.
CHUNK_ELEMENTS = 2**24
# Queries of a chunk: later ones see more keys, and scores are computed for all of them.
CHUNK_QUERIES = 256
# Rows of a kernel's tile: a chunk of 85 queries costs as much as one of 128.
_TILE_QUERIES = 64


class KeySubset(Protocol):
    """A chunk of queries and the keys for each of them."""

    @property
    def queries(self) -> slice:
        """Their place on the query axis."""
        ...

    @property
    def seen(self) -> Tensor:
        """Bool, broadcastable to [B, Q, P]: False where a query does not have a P-th key."""
        ...

    @property
    def heads(self) -> int:
        """Heads whose scores are computed at a time."""
        ...

    def take(self, rows: Tensor) -> Tensor:
        """The keys' rows of ``rows`` [S_k, B, D], as the other methods take them."""
        ...

    def products(self, query: Tensor, taken: Tensor) -> Tensor:
        """Dot products [B, H, Q, P] of ``query`` [Q, B, H, D] with the keys' rows."""
        ...

    def sum_of_keys(self, weights: Tensor, taken: Tensor) -> Tensor:
        """Sums [Q, B, H, D] of the keys' rows, weighted by ``weights`` [B, H, Q, P]."""
        ...

    def add_to_keys(self, total: Tensor, weights: Tensor, query: Tensor) -> None:
        """Add ``query`` [Q, B, H, D] with ``weights`` [B, H, Q, P] to the keys' rows of ``total``.

        Args:
            total: [S_k, B, D], changed in place.
        """
        ...


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """All keys that the queries see: a run of the key axis, the same for all but its end.

    Attributes:
        span: The queries and the keys.
        device: Where the tensors are.
        heads: See ``KeySubset``.
    """

    span: Span
    device: torch.device
    heads: int

    @property
    def queries(self) -> slice:
        """See ``KeySubset``."""
        return self.span.queries

    @property
    def num_seen(self) -> Tensor:
        """Number of keys that each query sees, int64 [Q]; they are the first ones of the run."""
        queries, keys = self.span.num_queries, self.span.num_keys
        if self.span.causal_offset is None:
            return torch.full((queries,), keys, device=self.device)
        seen = torch.arange(queries, device=self.device) + self.span.causal_offset + 1
        return seen.clamp(0, keys)

    @property
    def seen(self) -> Tensor:
        """See ``KeySubset``."""
        keys = torch.arange(self.span.num_keys, device=self.device)
        return keys < self.num_seen[:, None]

    def take(self, rows: Tensor) -> Tensor:
        """See ``KeySubset``: [P, B, D]."""
        return rows[self.span.keys]

    def products(self, query: Tensor, taken: Tensor) -> Tensor:
        """See ``KeySubset``."""
        return torch.einsum("qbhd,pbd->bhqp", query, taken)

    def sum_of_keys(self, weights: Tensor, taken: Tensor) -> Tensor:
        """See ``KeySubset``."""
        return torch.einsum("bhqp,pbd->qbhd", weights, taken)

    def add_to_keys(self, total: Tensor, weights: Tensor, query: Tensor) -> None:
        """See ``KeySubset``."""
        total[self.span.keys] += torch.einsum("bhqp,qbhd->pbd", weights, query)


@dataclass(frozen=True, eq=False)
class ChosenKeys:
    """The keys that a selection has for the queries.

    Attributes:
        queries: See ``KeySubset``.
        indices: int32 [Q, B, P], -1 where there are fewer.
        heads: See ``KeySubset``.
    """

    queries: slice
    indices: Tensor
    heads: int

    @property
    def seen(self) -> Tensor:
        """See ``KeySubset``."""
        return (self.indices >= 0).transpose(0, 1)

    def take(self, rows: Tensor) -> Tensor:
        """See ``KeySubset``: [Q, B, P, D]; zeros where there is no key."""
        batch = torch.arange(rows.shape[1], device=rows.device)
        taken = rows[self.indices.clamp(min=0).long(), batch[:, None]]
        # The first row may be memory of a cache that holds NaN.
        return taken.masked_fill_((self.indices < 0)[..., None], 0.0)

    def products(self, query: Tensor, taken: Tensor) -> Tensor:
        """See ``KeySubset``."""
        return torch.einsum("qbhd,qbpd->bhqp", query, taken)

    def sum_of_keys(self, weights: Tensor, taken: Tensor) -> Tensor:
        """See ``KeySubset``."""
        return torch.einsum("bhqp,qbpd->qbhd", weights, taken)

    def add_to_keys(self, total: Tensor, weights: Tensor, query: Tensor) -> None:
        """See ``KeySubset``; missing keys must have weight 0.

        On a GPU the order of these sums, and so the last bits, differ from run to run unless
        ``torch.use_deterministic_algorithms`` is on.
        """
        rows = torch.einsum("bhqp,qbhd->qbpd", weights, query)
        batch = torch.arange(total.shape[1], device=total.device)
        places = self.indices.clamp(min=0).long() * total.shape[1] + batch[:, None]
        total.view(-1, total.shape[-1]).index_add_(0, places.flatten(), rows.flatten(0, 2))


def visible_keys(
    spans: Spans,
    batch: int,
    device: torch.device,
    elements: int = CHUNK_ELEMENTS,
    queries: int = CHUNK_QUERIES,
) -> Iterator[VisibleKeys]:
    """All queries of the spans in chunks whose scores, of one head at least, are ``elements``.

    Args:
        spans: Which queries see which keys. Queries that see none are left out.
        batch: Batch size.
        device: Where the tensors are.
        elements: Most numbers of [B, H, Q, P].
        queries: Of a chunk, at most; chunks of more than 64 have a multiple of it.
    """
    for span in spans:
        size = max(1, min(queries, elements // max(1, batch * span.num_keys)))
        if size > _TILE_QUERIES:
            size -= size % _TILE_QUERIES
        for chunk in Spans([span]).chunks(size):
            # With a negative offset the first queries of a span see no key.
            if chunk.num_keys > 0:
                scores = batch * chunk.num_queries * chunk.num_keys
                yield VisibleKeys(chunk, device, heads=max(1, elements // max(1, scores)))


def chosen_keys(
    indices: Tensor, width: int, elements: int = CHUNK_ELEMENTS
) -> Iterator[ChosenKeys]:
    """All queries in chunks whose gathered keys have ``elements`` numbers.

    Args:
        indices: A selection, int32 [S_q, B, topk].
        width: Numbers of a key's row that is gathered; 1 where none is.
        elements: Most numbers of [Q, B, P, width], and of [B, H, Q, P].
    """
    num_queries, batch, topk = indices.shape
    row = max(1, batch * topk)
    size = max(1, elements // (row * max(1, width)))
    for first in range(0, num_queries, size):
        part = slice(first, min(first + size, num_queries))
        heads = max(1, elements // (row * (part.stop - part.start)))
        yield ChosenKeys(part, indices[part], heads)


def turns(
    tp_group: dist.ProcessGroup | None, chunks: Iterable[_Chunk]
) -> Iterator[tuple[_Chunk, int, bool]]:
    """Every chunk, the rank that computes it, and whether that is this one; ranks take turns.

    Tensor-parallel ranks have the same queries, of which the later ones see more keys.
    """
    size, rank = (tp_group.size(), tp_group.rank()) if tp_group is not None else (1, 0)
    for number, chunk in enumerate(chunks):
        owner = number % size
        yield chunk, owner, owner == rank


def head_groups(num_heads: int, size: int) -> Iterable[slice]:
    """Heads in groups of at most ``size``."""
    return (slice(h, min(h + size, num_heads)) for h in range(0, num_heads, size))
