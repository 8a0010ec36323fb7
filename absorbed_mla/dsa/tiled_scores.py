"""The indexer's scores in plain PyTorch, to the bit those of the query and the key alone.

For parity mode: training, prefill and decode then select the same keys. As in
``core_attention.tiled_reference`` every query has products of its own, of one shape, over tiles of
keys counted from the first key of its sequence.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from absorbed_mla.core_attention.tiled_reference import TILE_KEYS, padded_rows, row_products
from absorbed_mla.dsa.key_subset import ChosenKeys, VisibleKeys
from absorbed_mla.dsa.types import IndexVectors


def tiled_index_scores(index: IndexVectors, keys: VisibleKeys, relu: bool) -> Tensor:
    """``index_scores`` whose bits do not depend on the other queries, on the chunk or the pack.

    Args:
        index: Of all queries and keys.
        keys: The queries, and a run of keys that begins with the first key of their sequence.
        relu: Whether products pass a ReLU.

    Returns:
        [B, Q, K] in the dtype of the weights.
    """
    weights = index.weights[keys.queries]
    query = padded_rows(index.query[keys.queries].to(weights.dtype))
    found = weights.new_empty(query.shape[1], keys.span.num_queries, keys.span.num_keys)
    weights = padded_rows(weights)
    more_heads = weights.shape[-1] - query.shape[2]
    taken = padded_rows(keys.take(index.key).to(weights.dtype))
    for entry in range(query.shape[1]):
        own_query, own_weights = query[:, entry].contiguous(), weights[:, entry].contiguous()
        for start in range(0, len(taken), TILE_KEYS):
            tile = taken[start : start + TILE_KEYS, entry]
            count = len(tile)
            tile = F.pad(tile, (0, 0, 0, TILE_KEYS - count))
            tile = tile.expand(len(own_query), -1, -1).contiguous()
            scores = _tile_scores(own_query, own_weights, tile, more_heads, relu)
            found[entry, :, start : start + count] = scores[:, :count]
    return found


def tiled_cached_scores(index: IndexVectors, keys: ChosenKeys, relu: bool) -> Tensor:
    """``index_scores`` for keys of a cache, to the bit :func:`tiled_index_scores`.

    Args:
        index: Of the queries, and all keys of the cache, on a batch of one.
        keys: For each query keys of its sequence in their order, from a multiple of ``TILE_KEYS``
            on; those that it does not see are missing.
        relu: Whether products pass a ReLU.

    Returns:
        [1, Q, K] in the dtype of the weights.
    """
    weights = index.weights[keys.queries, 0]
    query = padded_rows(index.query[keys.queries, 0].to(weights.dtype)).contiguous()
    more_heads = padded_rows(weights).shape[-1] - query.shape[1]
    weights = padded_rows(weights).contiguous()
    found = weights.new_empty(1, *keys.indices.shape[::2])
    for start in range(0, found.shape[-1], TILE_KEYS):
        part = keys.indices[..., start : start + TILE_KEYS]
        count = part.shape[-1]
        tile = ChosenKeys(keys.queries, part, keys.heads).take(index.key)[:, 0]
        tile = padded_rows(F.pad(tile.to(weights.dtype), (0, 0, 0, TILE_KEYS - count)))
        scores = _tile_scores(query, weights, tile.contiguous(), more_heads, relu)
        found[0, :, start : start + count] = scores[:, :count]
    return found


def _tile_scores(
    query: Tensor, weights: Tensor, tile: Tensor, more_heads: int, relu: bool
) -> Tensor:
    """Scores [Q, TILE_KEYS] of ``query`` [Q, Hi, D] with the keys of each, [Q, TILE_KEYS, D].

    ``weights`` are [Q, Hi + more_heads].
    """
    products = row_products(query, tile.transpose(1, 2))
    products = products.relu_() if relu else products
    products = F.pad(products, (0, 0, 0, more_heads))
    return row_products(weights.unsqueeze(1), products)[:, 0]
