"""Index vectors of new tokens in one step of generation, and the cached index keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from absorbed_mla.dsa.backend import IndexerBackend
from absorbed_mla.dsa.types import IndexVectors
from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import InferenceStep


@dataclass(frozen=True, eq=False)
class CachedIndex:
    """Index vectors of one layer in one step.

    Attributes:
        query: Of the new tokens, [T, Hi, Di].
        weights: Of the new tokens, [T, Hi].
        cache: Index keys, the new tokens' included, [blocks, block_size, Di].
        rows: Which tokens are whose, and where their keys are.
    """

    query: Tensor
    weights: Tensor
    cache: Tensor
    rows: Rows

    @classmethod
    def write(cls, step: InferenceStep, index: IndexVectors, indexed: Sequence[int]) -> CachedIndex:
        """Append the keys of ``index`` [S, B, ...], in Megatron's layout, to the cache.

        Args:
            step: Of the layer.
            index: Of the new tokens.
            indexed: Numbers of the layers in the model, from 1, that have an indexer, in order.
        """
        heads = index.query.shape[2:]
        cache = step.write_index_keys(step.pack(index.key), indexed)
        query = step.pack(index.query.flatten(2)).squeeze(1).unflatten(-1, heads)
        return cls(query, step.pack(index.weights).squeeze(1), cache, step.rows)

    def select(self, backend: IndexerBackend, topk: int, *, relu: bool) -> Tensor:
        """See ``IndexerBackend.select_cached``."""
        return backend.select_cached(
            self.query, self.weights, self.cache, self.rows, topk, relu=relu
        )
