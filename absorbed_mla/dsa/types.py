"""Index vectors: what an indexer computes from its input."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class IndexVectors(NamedTuple):
    """Queries, keys and head weights of an indexer.

    The score of query t with key s is the sum over heads j of
    ``weights[t, j] * ReLU(query[t, j] . key[s])``, where the ReLU is a setting. The gradients of
    these tensors have the same type.

    Attributes:
        query: [S_q, B, Hi, Di].
        key: [S_k, B, Di], one for all heads.
        weights: [S_q, B, Hi], with the factor Hi^-1/2 Di^-1/2; fp32 (fp64).
    """

    query: Tensor
    key: Tensor
    weights: Tensor
