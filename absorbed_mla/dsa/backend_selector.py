"""Backend selection of a DSA layer: sparse attention and indexer backends, per kind of call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from absorbed_mla.caching import DerivedTables
from absorbed_mla.core_attention.backend import DETERMINISM_REQUIRED
from absorbed_mla.dims import MLADims
from absorbed_mla.dsa.backend import SparseRequest, choose_implementation
from absorbed_mla.dsa.config import DSAConfig
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.registry import SPARSE_BACKENDS, Registry


class SparseBackendSelector:
    """Chooses backends, once for every kind of call.

    Args:
        options: Name the backends.
        dims: Dimensions of the layer on this rank.
        dsa: Of the indexer.
    """

    def __init__(self, options: AbsorbedMLAOptions, dims: MLADims, dsa: DSAConfig) -> None:
        self._options, self._dims, self._dsa = options, dims, dsa
        self._chosen = DerivedTables()

    def get(self, registry: Registry, request: SparseRequest) -> Any:
        """The entry of ``SPARSE_BACKENDS`` or ``INDEXER_BACKENDS`` for a call.

        Raises:
            ValueError: If the one that the options name cannot run what is requested.
        """
        asked = getattr(self._options, registry.option)
        return self._chosen.get(
            (registry.option, request), lambda: choose_implementation(registry, asked, request)
        )

    def request(self, x: Tensor) -> SparseRequest:
        """What a call asks whose tensors are like this one."""
        return SparseRequest(
            device=x.device,
            dtype=x.dtype,
            heads=self._dims.num_heads_per_rank,
            kv_lora_rank=self._dims.kv_lora_rank,
            rope_dim=self._dims.qk_rope_head_dim,
            index_heads=self._dsa.num_heads,
            index_dim=self._dsa.head_dim,
            topk=self._dsa.topk,
            relu=self._dsa.scoring_relu,
            deterministic=torch.get_deterministic_debug_mode() == DETERMINISM_REQUIRED,
            batch_invariant=self._options.batch_invariant,
        )

    def dense_serves(self, request: SparseRequest, lengths: Iterable[int]) -> bool:
        """Whether the dense attention serves: no sequence of these is longer than top-k.

        In parity mode that must give the bits of a choice of all keys.
        """
        if self._dsa.topk < max(lengths, default=0):
            return False
        return not request.batch_invariant or bool(self.get(SPARSE_BACKENDS, request).equals_dense)
