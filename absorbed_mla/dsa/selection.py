"""Exact top-k selection of the keys of every query, in a total order."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.dsa.key_subset import (
    CHUNK_ELEMENTS,
    CHUNK_QUERIES,
    VisibleKeys,
    turns,
    visible_keys,
)
from absorbed_mla.dsa.scores import index_scores
from absorbed_mla.dsa.types import IndexVectors


@torch.no_grad()
def select(
    index: IndexVectors,
    spans: Spans,
    topk: int,
    *,
    relu: bool,
    tp_group: dist.ProcessGroup | None = None,
    scores: Callable[[IndexVectors, VisibleKeys, bool], Tensor] = index_scores,
    best: Callable[[Tensor, VisibleKeys, int], Tensor] | None = None,
    elements: int = CHUNK_ELEMENTS,
    queries: int = CHUNK_QUERIES,
) -> Tensor:
    """The ``topk`` keys of highest score that each query sees; of equal scores the first ones.

    Scores exist for one chunk of queries at a time. Queries that see no more than ``topk`` keys get
    all of them, and their scores are not computed. NaN counts as the highest score, so that the
    attention meets it.

    Args:
        index: Index queries, keys and weights; queries and keys may be different tokens.
        spans: Which queries see which keys; queries in no span choose none.
        topk: Most keys of a query.
        relu: Whether products pass a ReLU.
        tp_group: Ranks that call with the same arguments; each selects for some of the queries.
        scores: Computes [B, Q, K] for a chunk; ``tiled_index_scores`` in parity mode.
        best: Chooses by the scores; None for :func:`best_keys`.
        elements: Most scores of one head that are held at a time.
        queries: Most queries of a chunk.

    Returns:
        int32 [S_q, B, topk] on the key axis, ascending, then -1.
    """
    num_queries, batch = index.query.shape[:2]
    chosen = index.query.new_full((num_queries, batch, topk), -1, dtype=torch.int32)
    chunks = visible_keys(spans, batch, index.query.device, elements, queries)
    best = best or best_keys
    for keys, _, own in turns(tp_group, chunks):
        if not own:
            continue
        if keys.span.num_keys <= topk:
            # No query of the chunk has a choice.
            rows = first_keys(keys.num_seen, topk, keys.span.key_start)
            chosen[keys.queries] = rows[:, None]
        else:
            found = best(scores(index, keys, relu), keys, topk)
            chosen[keys.queries] = found.transpose(0, 1)
    if tp_group is not None and tp_group.size() > 1:
        # The other ranks have -1 where one has selected.
        dist.all_reduce(chosen, dist.ReduceOp.MAX, tp_group)
    return chosen


def first_keys(count: Tensor, topk: int, start: int = 0) -> Tensor:
    """All keys of queries that see ``count`` [...] of them from ``start`` on, ``topk`` at most.

    Returns:
        int32 [..., topk], ascending, then -1.
    """
    number = torch.arange(topk, device=count.device, dtype=torch.int32)
    return torch.where(number < count[..., None], number + start, -1)


def best_keys(scores: Tensor, keys: VisibleKeys, topk: int) -> Tensor:
    """The ``topk`` best of the visible keys in the total order (score, then lower index).

    Args:
        scores: [B, Q, K] over the keys of the span, more than ``topk`` of them.
        keys: The queries, and the keys that each sees.
        topk: Keys to choose.

    Returns:
        int32 [B, Q, topk] on the key axis, ascending, then -1.
    """
    return best_of(scores, keys.seen, topk, keys.span.key_start)


def best_of(scores: Tensor, seen: Tensor, topk: int, first: int = 0) -> Tensor:
    """The ``topk`` best of the keys that are seen in the total order (score, then lower index).

    ``torch.topk`` promises no order of equal scores, but the value of the k-th one is unique: all
    above it are chosen, and of those equal to it the first ones until there are ``topk``. That
    compares scores as numbers (0 and -0 are equal) in any dtype, and costs one ``torch.topk`` of
    the values, three passes and two running sums over the scores.

    Args:
        scores: [..., K], more than ``topk`` keys.
        seen: Bool, broadcastable to the scores.
        topk: Keys to choose.
        first: Number of the first key.

    Returns:
        int32 [..., topk], ascending, then -1.
    """
    scores = scores.masked_fill(scores.isnan(), torch.inf).masked_fill(~seen, -torch.inf)
    last = scores.topk(topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = scores > last
    ties = (scores == last) & seen
    missing = topk - above.sum(-1, keepdim=True, dtype=torch.int32)
    above |= ties & (ties.cumsum(-1, dtype=torch.int32) <= missing)
    return _indices(above, topk, first)


def _indices(chosen: Tensor, topk: int, first: int) -> Tensor:
    """Where ``chosen`` [..., K] is True, counted from ``first``: int32 [..., topk], then -1."""
    # One more place takes what is not chosen, and is cut off.
    place = chosen.cumsum(-1, dtype=torch.int32).sub_(1).masked_fill_(~chosen, topk)
    number = torch.arange(first, first + chosen.shape[-1], device=chosen.device, dtype=torch.int32)
    found = chosen.new_full((*chosen.shape[:-1], topk + 1), -1, dtype=torch.int32)
    found.scatter_(-1, place.long(), number.expand(chosen.shape))
    return found[..., :topk]
