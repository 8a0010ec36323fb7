"""The indexer's scores of one chunk of queries, and their gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from absorbed_mla.dsa.key_subset import KeySubset, head_groups
from absorbed_mla.dsa.types import IndexVectors


def index_scores(
    index: IndexVectors,
    subset: KeySubset,
    relu: bool,
    rounded: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """I = sum over heads of weight * ReLU(query . key), [B, Q, P] in the dtype of the weights.

    Heads are added in their order, in groups of a size that the shapes decide.

    Args:
        index: Of all queries and keys.
        subset: The queries, and the keys for each.
        relu: Whether products pass a ReLU.
        rounded: Rounds rows of queries and keys before they are multiplied; None for as they are.
    """
    weights = index.weights[subset.queries]
    query, taken = index.query[subset.queries], subset.take(index.key)
    if rounded is not None:
        query, taken = rounded(query), rounded(taken)
    query, taken = query.to(weights.dtype), taken.to(weights.dtype)
    total: Tensor | None = None
    for heads in head_groups(query.shape[2], subset.heads):
        products = subset.products(query[:, :, heads], taken)
        products = products.relu_() if relu else products
        part = torch.einsum("qbh,bhqp->bqp", weights[:, :, heads], products)
        total = part if total is None else total.add_(part)
    assert total is not None, "an indexer has a head"
    return total


def add_index_gradient(
    gradient: IndexVectors, score_grad: Tensor, index: IndexVectors, subset: KeySubset, relu: bool
) -> None:
    """Add the gradient of :func:`index_scores` to ``gradient``.

    Args:
        gradient: Of all queries and keys; the chunk's queries are overwritten, keys are added to.
        score_grad: [B, Q, P], 0 where a key is not seen.
        index: As in the forward.
        subset: As in the forward.
        relu: As in the forward.
    """
    rows = subset.queries
    weights = index.weights[rows]
    query = index.query[rows].to(weights.dtype)
    taken = subset.take(index.key).to(weights.dtype)
    for heads in head_groups(query.shape[2], subset.heads):
        products = subset.products(query[:, :, heads], taken)
        of_products = torch.einsum("bqp,qbh->bhqp", score_grad, weights[:, :, heads])
        if relu:
            of_products = of_products * (products > 0)
            products = products.relu_()
        of_weights = torch.einsum("bqp,bhqp->qbh", score_grad, products)
        gradient.weights[rows, :, heads] = of_weights
        gradient.query[rows, :, heads] = subset.sum_of_keys(of_products, taken).to(
            gradient.query.dtype
        )
        subset.add_to_keys(gradient.key, of_products, query[:, :, heads])
