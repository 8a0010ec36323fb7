"""Top-k selection for new tokens among the index keys cached for their requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from absorbed_mla.core_attention.tiled_reference import TILE_KEYS
from absorbed_mla.dsa.cached_keys import CachedRows
from absorbed_mla.dsa.key_subset import CHUNK_ELEMENTS, ChosenKeys
from absorbed_mla.dsa.scores import index_scores
from absorbed_mla.dsa.selection import best_of, first_keys
from absorbed_mla.dsa.types import IndexVectors
from absorbed_mla.inference.backends.reference import last_keys
from absorbed_mla.inference.rows import Rows

_CHUNK_TOKENS = 256


@torch.no_grad()
def select_cached(
    query: Tensor,
    weights: Tensor,
    cache: Tensor,
    rows: Rows,
    topk: int,
    *,
    relu: bool,
    scores: Callable[[IndexVectors, ChosenKeys, bool], Tensor] = index_scores,
    elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """The ``topk`` keys of highest score that each new token sees, as ``selection.select``.

    Token j of row r sees positions 0 .. kv_lengths[r] - query_lengths[r] + j. Of equal scores the
    first ones are chosen; who sees no more than ``topk`` keys gets all of them. Nothing waits for
    the device, and no shape depends on what is there: a CUDA graph can hold it.

    Args:
        query: Index queries of the new tokens, [T, Hi, Di].
        weights: [T, Hi], as in ``IndexVectors``.
        cache: Index keys, [blocks, block_size, Di], with any strides of blocks and positions; what
            no token was written to may be NaN.
        rows: Which tokens are whose, and where their keys are.
        topk: Most keys of a token.
        relu: Whether products pass a ReLU.
        scores: Computes [1, T, K] for a chunk; ``tiled_cached_scores`` in parity mode.
        elements: Most numbers of a tensor of scores or of keys.

    Returns:
        Positions in the token's request, int32 [T, topk], ascending, then -1; a token in no row has
        none.
    """
    tokens, keys = len(query), rows.max_kv_length
    row, last = last_keys(rows, tokens)
    if keys <= topk:
        # No token has a choice.
        return first_keys(last + 1, topk)
    chosen = query.new_empty(tokens, topk, dtype=torch.int32)
    cached = CachedRows(cache)
    size = max(1, min(_CHUNK_TOKENS, elements // max(keys, TILE_KEYS * query.shape[-1])))
    for first in range(0, tokens, size):
        part = slice(first, first + size)
        index = IndexVectors(query[part, None], cached.rows, weights[part, None])
        found, seen = _scores(
            index, cached, rows.block_table[row[part]], last[part], keys, relu, scores, elements
        )
        chosen[part] = best_of(found, seen, topk)
    return chosen


def _scores(
    index: IndexVectors,
    cached: CachedRows,
    tables: Tensor,
    last: Tensor,
    num_keys: int,
    relu: bool,
    scores: Callable[[IndexVectors, ChosenKeys, bool], Tensor],
    elements: int,
) -> tuple[Tensor, Tensor]:
    """Scores [T, K] with all positions of the longest request, and who sees which."""
    tokens, _, heads, width = index.query.shape
    found = index.weights.new_empty(tokens, num_keys)
    visible = torch.arange(num_keys, device=last.device) <= last[:, None]
    # Each token has keys of its own, gathered for some positions at a time.
    size = max(1, elements // (tokens * width * TILE_KEYS)) * TILE_KEYS
    for start in range(0, num_keys, size):
        seen = visible[:, start : start + size]
        end = start + seen.shape[1]
        position = torch.arange(start, end, device=last.device, dtype=torch.int32)
        slots = cached.slots(position.expand(seen.shape).masked_fill(~seen, -1), tables)
        at_a_time = max(1, min(heads, elements // max(1, seen.numel())))
        keys = ChosenKeys(slice(0, tokens), slots[:, None], at_a_time)
        found[:, start:end] = scores(index, keys, relu)[0]
    return found, visible
