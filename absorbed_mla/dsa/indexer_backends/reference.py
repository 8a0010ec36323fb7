"""The indexer's selection and loss in plain PyTorch."""

from __future__ import annotations

from functools import partial

from absorbed_mla.dsa.backend import SparseRequest
from absorbed_mla.dsa.cached_selection import select_cached
from absorbed_mla.dsa.indexer_loss import indexer_loss
from absorbed_mla.dsa.selection import select
from absorbed_mla.dsa.tiled_scores import tiled_cached_scores, tiled_index_scores


class InvariantReference:
    """For parity mode: see ``dsa/tiled_scores.py``."""

    select = staticmethod(partial(select, scores=tiled_index_scores))
    select_cached = staticmethod(partial(select_cached, scores=tiled_cached_scores))
    loss = staticmethod(indexer_loss)
    gathers_keys = True

    def why_not(self, request: SparseRequest) -> str | None:
        """Products of one row depend on the others on a GPU."""
        return None if request.device.type == "cpu" else "it is batch-invariant on a CPU only"


class ReferenceBackend:
    """Plain PyTorch in fp32 (fp64), a chunk of queries at a time."""

    name = "reference"
    summary = "plain PyTorch in fp32, any device and dtype"
    speed = 1.0
    invariant = InvariantReference()
    select = staticmethod(select)
    select_cached = staticmethod(select_cached)
    loss = staticmethod(indexer_loss)
    gathers_keys = True

    def why_not(self, request: SparseRequest) -> None:
        """Nothing is refused."""


ENTRY = ReferenceBackend()
