"""The Triton kernels of the indexer in parity mode: one kernel computes scores for all of it.

It reads index keys from a cache, some tokens and a block of keys at a time, and gives a score the
same bits whatever the other tokens are.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from absorbed_mla.dsa.backend import SparseRequest
from absorbed_mla.dsa.indexer_loss import indexer_loss
from absorbed_mla.dsa.indexer_triton import TRITON_PIECES
from absorbed_mla.dsa.key_subset import VisibleKeys
from absorbed_mla.dsa.selection_triton import triton_select, triton_select_cached
from absorbed_mla.dsa.types import IndexVectors


def invariant_scores(index: IndexVectors, keys: VisibleKeys, relu: bool) -> Tensor:
    """``triton_index_scores`` by the kernel of caches, [B, Q, K].

    The key axis is the cache, with blocks of one key, and the chunk its only request.
    """
    from absorbed_mla.kernels.dsa.cached_scores import Tokens, cached_scores

    span, device = keys.span, index.query.device
    queries = span.queries
    table = torch.arange(span.num_keys, dtype=torch.int32, device=device)[None]
    seen = keys.num_seen.int()
    row, end = seen.new_zeros(len(seen)), seen.new_full((len(seen),), len(seen))
    places, part = Tokens(row, seen, end), slice(0, len(seen))
    found = [
        cached_scores(
            index.query[queries, entry],
            index.weights[queries, entry],
            index.key[span.key_start :, entry, None],
            table,
            places,
            part,
            span.num_keys,
            relu,
            tiles=True,
        )
        for entry in range(index.query.shape[1])
    ]
    return torch.stack(found)


class InvariantIndexer:
    """Selection by scores of one kernel."""

    select = staticmethod(partial(triton_select, scores=invariant_scores))
    select_cached = staticmethod(partial(triton_select_cached, tiles=True))
    loss = staticmethod(partial(indexer_loss, pieces=TRITON_PIECES))
    gathers_keys = False

    def why_not(self, request: SparseRequest) -> None:
        """Nothing more is refused."""
