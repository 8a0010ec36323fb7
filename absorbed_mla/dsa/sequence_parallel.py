"""Index vectors of all tokens where sequence parallelism gives a rank its own part of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from absorbed_mla.dsa.indexer import Indexer
from absorbed_mla.dsa.types import IndexVectors


class SequenceParallelIndexer(NamedTuple):
    """An indexer that projects a rank's tokens and gathers those of the others.

    Attributes:
        indexer: Has the parameters.
        tp_group: Of the ranks that have parts of the tokens; None where each has all.
    """

    indexer: Indexer
    tp_group: dist.ProcessGroup | None

    def vectors(
        self, hidden_states: Tensor, query_latent: Callable[[], Tensor], cos: Tensor, sin: Tensor
    ) -> IndexVectors:
        """Index vectors of all tokens of this context-parallel rank.

        Args:
            hidden_states: Of this rank's tokens, [S or S / tp, B, hidden_size].
            query_latent: Makes the normalised latent of the query, of the same tokens.
            cos: fp32 [S, R / 2], for the positions of all tokens.
            sin: Likewise.
        """
        with torch.no_grad():
            latent = query_latent()
        own = (self._own_rows(x, len(hidden_states)) for x in (cos, sin))
        return IndexVectors(*map(self._all_rows, self.indexer(hidden_states, latent, *own)))

    def key(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The key of :meth:`vectors` alone."""
        own = (self._own_rows(x, len(hidden_states)) for x in (cos, sin))
        return self._all_rows(self.indexer.key(hidden_states, *own))

    def _own_rows(self, x: Tensor, count: int) -> Tensor:
        """Of all tokens' rows those that this rank projects."""
        if self.tp_group is None:
            return x
        rank = self.tp_group.rank()
        return x[rank * count : (rank + 1) * count]

    def _all_rows(self, x: Tensor) -> Tensor:
        """Rows of all ranks; backward sums over them: they take turns with the loss's queries."""
        if self.tp_group is None:
            return x
        gathered: Tensor = gather_from_sequence_parallel_region(x, group=self.tp_group)
        return gathered
