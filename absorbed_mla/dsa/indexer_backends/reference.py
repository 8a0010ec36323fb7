"""The indexer's selection and loss in plain PyTorch."""

from __future__ import annotations

from absorbed_mla.dsa.backend import SparseRequest
from absorbed_mla.dsa.indexer_loss import indexer_loss
from absorbed_mla.dsa.selection import select


class ReferenceBackend:
    """Plain PyTorch in fp32 (fp64), a chunk of queries at a time."""

    name = "reference"
    summary = "plain PyTorch in fp32, any device and dtype"
    speed = 1.0
    select = staticmethod(select)
    loss = staticmethod(indexer_loss)

    def why_not(self, request: SparseRequest) -> None:
        """Nothing is refused."""


ENTRY = ReferenceBackend()
