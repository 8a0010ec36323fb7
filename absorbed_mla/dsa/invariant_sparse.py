"""The Triton kernels of attention over chosen keys in parity mode."""

from __future__ import annotations

from absorbed_mla.dsa.backend import SparseRequest
from absorbed_mla.dsa.sparse_kernels import SparseKernels


class InvariantSparse(SparseKernels):
    """Attention over chosen keys by ``kernels/dsa/forward.py``."""

    forward_kernel = "invariant"
    backward_kernel = "triton"
    # The dense kernels have other tiles.
    equals_dense = False

    def why_not(self, request: SparseRequest) -> None:
        """Nothing more is refused."""
