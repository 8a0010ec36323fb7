"""Attention over chosen keys in plain PyTorch."""

from __future__ import annotations

from functools import partial

from absorbed_mla.dsa.backend import SparseRequest
from absorbed_mla.dsa.cached_attention import attend_cached
from absorbed_mla.dsa.sparse_reference import sparse_backward, sparse_forward
from absorbed_mla.dsa.tiled_sparse import tiled_sparse_forward


class InvariantReference:
    """For parity mode: see ``dsa/tiled_sparse.py``."""

    equals_dense = True
    forward = staticmethod(tiled_sparse_forward)
    forward_cached = staticmethod(partial(attend_cached, tiled_sparse_forward))
    backward = staticmethod(sparse_backward)

    def why_not(self, request: SparseRequest) -> str | None:
        """Products of one row depend on the others on a GPU."""
        return None if request.device.type == "cpu" else "it is batch-invariant on a CPU only"


class ReferenceBackend:
    """Plain PyTorch in fp32 (fp64 for fp64 inputs); see ``dsa/sparse_reference.py``."""

    name = "reference"
    summary = "plain PyTorch in fp32, any device and dtype"
    speed = 1.0
    invariant = InvariantReference()
    forward = staticmethod(sparse_forward)
    forward_cached = staticmethod(partial(attend_cached, sparse_forward))
    backward = staticmethod(sparse_backward)

    def why_not(self, request: SparseRequest) -> None:
        """Nothing is refused."""


ENTRY = ReferenceBackend()
