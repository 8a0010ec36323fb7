"""This package's Triton kernels of attention over chosen keys."""

from __future__ import annotations

from absorbed_mla.core_attention.backends.triton import ENTRY as DENSE
from absorbed_mla.dsa.backend import SparseRequest
from absorbed_mla.dsa.sparse_kernels import InvariantSparse, SparseKernels, dense_request
from absorbed_mla.inference.paged_kernels import why_not_fp8_rows


class TritonBackend(SparseKernels):
    """See ``kernels/dsa``."""

    name = forward_kernel = backward_kernel = "triton"
    summary = "this package's Triton kernels, compute capability 8.0 or newer"
    speed = 2.0
    invariant = InvariantSparse()

    def why_not(self, request: SparseRequest) -> str | None:
        """See ``SparseBackend``; the limits are those of the dense kernels."""
        fp8 = request.latent_cache_dtype == "fp8"
        return why_not_fp8_rows(request.device, fp8) or DENSE.why_not(dense_request(request))


ENTRY = TritonBackend()
