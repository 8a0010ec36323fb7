"""This package's Triton kernels over a paged latent cache (``kernels/paged``)."""

from __future__ import annotations

from typing import ClassVar

from absorbed_mla.core_attention.backends.triton import ENTRY as TRITON
from absorbed_mla.inference.backend import PagedRequest, Rates
from absorbed_mla.inference.paged_kernels import (
    PagedKernelBackend,
    training_request,
    why_not_fp8_rows,
)


class PagedTriton(PagedKernelBackend):
    """See :class:`~absorbed_mla.inference.backend.PagedBackend`; can be batch-invariant."""

    name = "triton"
    summary = "this package's Triton kernels: fp16 and bf16, compute capability 8.0 and newer"
    # On a CPU there is only Triton's interpreter.
    rates: ClassVar[Rates] = {
        "NVIDIA H200": (295.0, 295.0),
        "cpu": (1e-6, 1e-6),
    }

    def why_not(self, request: PagedRequest) -> str | None:
        """As in training; an FP8 cache needs a GPU that knows FP8."""
        fp8 = request.latent_cache_dtype == "fp8"
        return why_not_fp8_rows(request.device, fp8) or TRITON.why_not(training_request(request))


ENTRY = PagedTriton()
