"""This package's Hopper kernel over a paged latent cache (``kernels/hopper/decode.py``)."""

from __future__ import annotations

from typing import ClassVar

from absorbed_mla.core_attention.backends.hopper import ENTRY as HOPPER
from absorbed_mla.inference.backend import PagedRequest, Rates
from absorbed_mla.inference.paged_kernels import PagedKernelBackend, training_request

# The block size must be a multiple of the fewest tokens that one copy loads: LEAST_PAGE of
# kernels/hopper/decode.py, which cannot be imported without Triton.
_PAGE_TOKENS = 16


class PagedHopper(PagedKernelBackend):
    """See :class:`~absorbed_mla.inference.backend.PagedBackend`; can be batch-invariant."""

    name = "hopper"
    summary = "this package's Hopper kernel: fp16 and bf16, compute capability 9.0"
    rates: ClassVar[Rates] = {"NVIDIA H200": (640.0, 640.0)}

    def why_not(self, request: PagedRequest) -> str | None:
        """As in training, and for the cache's block size, which may be any of FP8 rows.

        In parity mode training has chosen, and the kernel raises if it cannot load the keys.
        """
        by_pages = request.device.type == "cuda" and request.latent_cache_dtype == "model"
        by_pages &= not request.batch_invariant
        if by_pages and request.block_size % _PAGE_TOKENS:
            return (
                f"it needs a block size that is a multiple of {_PAGE_TOKENS}; the cache has "
                f"{request.block_size}"
            )
        return HOPPER.why_not(training_request(request))


ENTRY = PagedHopper()
