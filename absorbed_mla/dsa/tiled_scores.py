"""The indexer's scores in plain PyTorch, to the bit those of the query and the key alone.

For parity mode: training, prefill and decode then select the same keys. As in
``core_attention.tiled_reference`` every query has products of its own, of one shape, over tiles of
keys counted from the first key of its sequence.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from absorbed_mla.core_attention.tiled_reference import TILE_KEYS, padded_rows, row_products
from absorbed_mla.dsa.support import VisibleKeys
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
            products = row_products(own_query, tile.transpose(1, 2))
            products = products.relu_() if relu else products
            products = F.pad(products, (0, 0, 0, more_heads))
            scores = row_products(own_weights.unsqueeze(1), products)
            found[entry, :, start : start + count] = scores[:, 0, :count]
    return found
