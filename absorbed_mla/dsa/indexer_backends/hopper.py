"""The indexer's selection by the Triton kernels; its loss with the target kernel for Hopper."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from absorbed_mla.dsa.backend import SparseBackend, SparseRequest
from absorbed_mla.dsa.backends.hopper import ENTRY as SPARSE
from absorbed_mla.dsa.indexer_backends.triton import TritonBackend
from absorbed_mla.dsa.indexer_loss import indexer_loss
from absorbed_mla.dsa.indexer_triton import TRITON_PIECES, TritonHeadSum


class HopperHeadSum(TritonHeadSum):
    """Of chosen keys by the kernel for Hopper."""

    sparse: SparseBackend = SPARSE

    def chosen_target(
        self, operands: tuple[Tensor, Tensor, Tensor, Tensor], lse: Tensor, chosen: Tensor
    ) -> Tensor:
        """See ``TritonHeadSum``."""
        from absorbed_mla.kernels.hopper.sparse_target import sparse_target

        return sparse_target(operands, lse, chosen, self.scale)


class HopperBackend(TritonBackend):
    """See ``kernels/hopper/sparse_target_kernel.py``."""

    name = "hopper"
    summary = "as `triton`, the loss over chosen keys by a kernel for Hopper; limits of attention"
    speed = 3.0
    invariant = None
    loss = staticmethod(
        partial(indexer_loss, pieces=TRITON_PIECES._replace(head_sum=HopperHeadSum))
    )

    def why_not(self, request: SparseRequest) -> str | None:
        """See ``IndexerBackend``; the limits are those of the sparse kernels, too."""
        return super().why_not(request) or SPARSE.why_not(request)


ENTRY = HopperBackend()
