"""This package's Gluon kernels of attention over chosen keys for Hopper."""

from __future__ import annotations

from absorbed_mla.core_attention.backends.hopper import ENTRY as DENSE
from absorbed_mla.dsa.backend import SparseRequest
from absorbed_mla.dsa.sparse_kernels import SparseKernels, dense_request

_ROPE_WIDTH = 64


class HopperBackend(SparseKernels):
    """See ``kernels/hopper/sparse_forward_kernel.py``."""

    name = forward_kernel = backward_kernel = "hopper"
    summary = "this package's kernels for Hopper, kv_lora_rank 128, 256 or 512, rope 64"
    speed = 4.0

    def why_not(self, request: SparseRequest) -> str | None:
        """See ``SparseBackend``; the limits are those of the dense kernels, and of a gather."""
        reason = DENSE.why_not(dense_request(request))
        if reason is None and request.rope_dim != _ROPE_WIDTH:
            return f"qk_pos_emb_head_dim must be {_ROPE_WIDTH}, it is {request.rope_dim}"
        if reason is None and request.latent_cache_dtype != "model":
            return "it gathers cached latents of the model's dtype, not FP8 rows"
        return reason


ENTRY = HopperBackend()
