"""The indexer's scores and the choice of keys by the ``triton`` kernels.

Both are called like the functions of ``scores.py`` and ``selection.py`` that they replace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.dsa.key_subset import CHUNK_QUERIES, VisibleKeys
from absorbed_mla.dsa.selection import select
from absorbed_mla.dsa.types import IndexVectors

# Scores of 256 queries and 4096 keys are 64 tiles, for 132 multiprocessors.
_MOST_QUERIES = 2048
# Scores of 512 queries and 131072 keys: 256 MiB, and about two programs of the choice for each of
# the 264 that run at a time.
ELEMENTS = 2**26


def triton_index_scores(index: IndexVectors, keys: VisibleKeys, relu: bool) -> Tensor:
    """As ``index_scores``, fp32; products are those of the operands in their own precision."""
    from absorbed_mla.kernels.dsa.index_scores import index_scores

    span = keys.span
    return index_scores(
        *index, span.queries, span.key_start, span.num_keys, span.causal_offset, relu
    )


def triton_best_keys(scores: Tensor, keys: VisibleKeys, topk: int) -> Tensor:
    """As ``best_keys``, to the bit, but [Q, B, topk]."""
    from absorbed_mla.kernels.dsa.radix_select import radix_select

    return radix_select(scores, topk, keys.span.key_start, keys.span.causal_offset)


def chunk_queries(tp_group: dist.ProcessGroup | None) -> int:
    """Queries of a chunk: few of them keep a part of a GPU busy, and ranks take turns."""
    ranks = 1 if tp_group is None else tp_group.size()
    return max(CHUNK_QUERIES, _MOST_QUERIES // ranks)


def triton_select(
    index: IndexVectors,
    spans: Spans,
    topk: int,
    *,
    relu: bool,
    tp_group: dist.ProcessGroup | None = None,
    scores: Callable[[IndexVectors, VisibleKeys, bool], Tensor] = triton_index_scores,
    elements: int = ELEMENTS,
) -> Tensor:
    """As ``select``; the same keys wherever the scores have the same bits."""
    with torch.cuda.device_of(index.query):
        return select(
            index,
            spans,
            topk,
            relu=relu,
            tp_group=tp_group,
            scores=scores,
            best=lambda *chunk: triton_best_keys(*chunk).transpose(0, 1),
            elements=elements,
            queries=chunk_queries(tp_group),
        )


@torch.no_grad()
def triton_select_cached(
    query: Tensor,
    weights: Tensor,
    cache: Tensor,
    rows: Any,
    topk: int,
    *,
    relu: bool,
    tiles: bool = False,
    elements: int = ELEMENTS,
) -> Tensor:
    """The ``topk`` keys of highest score among those that new tokens see in a cache.

    Scores exist for some tokens at a time. Nothing waits for the device: launches depend on the
    shapes and on the bounds of lengths alone.

    Args:
        query: Index queries of the new tokens, [T, Hi, Di].
        weights: Of their heads, fp32 [T, Hi].
        cache: Index keys, [blocks, block_size, Di].
        rows: ``inference.rows.Rows`` of the tokens.
        topk: Most keys of a token.
        relu: Whether products pass a ReLU.
        tiles: As of ``cached_scores``.
        elements: Most scores that are held at a time.

    Returns:
        int32 [T, topk]: places in the request, ascending, then -1; -1 for a token in no row.
    """
    from absorbed_mla.kernels.dsa.cached_scores import cached_scores, locate
    from absorbed_mla.kernels.dsa.radix_select import radix_select

    tokens, keys = len(query), rows.max_kv_length
    chosen = torch.empty(tokens, 1, topk, dtype=torch.int32, device=query.device)
    lengths = rows.query_starts, rows.query_lengths, rows.kv_lengths
    with torch.cuda.device_of(query):
        places = locate(*lengths, rows.max_query_length, tokens)
        step = max(16, elements // max(keys, 1))
        for first in range(0, tokens, step):
            part = slice(first, min(first + step, tokens))
            if keys > topk:
                scores = cached_scores(
                    query,
                    weights,
                    cache,
                    rows.block_table,
                    places,
                    part,
                    keys,
                    relu,
                    tiles=tiles or rows.max_query_length > 1,
                )
            else:
                # Where no query has a choice, the scores are not read.
                scores = query.new_empty(1, dtype=torch.float32)
                scores = scores.expand(part.stop - part.start, keys)
            radix_select(scores[None], topk, 0, None, out=chosen[part], seen=places.seen[part])
    return chosen.squeeze(1)
