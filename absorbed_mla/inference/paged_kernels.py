"""Base class of the paged backends that run this package's own kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionRequest
from absorbed_mla.inference.backend import PagedRequest
from absorbed_mla.inference.rows import Rows
from absorbed_mla.kernels import operators
from absorbed_mla.kernels.paged.call import PagedCall

_FP8_CAPABILITY = (8, 9)


class PagedKernelBackend:
    """Calls the paged kernels of the folder of ``kernels`` that is named like the backend.

    With ``batch_invariant`` a token gets the bits of the training kernel of the same name.
    """

    name: str
    forms = ("absorbed",)

    def forward(
        self,
        q_content: Tensor,
        q_rope: Tensor,
        cache: Tensor,
        rows: Rows,
        scale: float,
        key_start: int = 0,
        key_end: int | None = None,
        batch_invariant: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See ``backends.reference.paged_reference``; the LSE is in fp32."""
        how = key_start, key_end, batch_invariant
        call = PagedCall(
            q_content,
            q_rope,
            cache,
            rows.query_starts,
            rows.query_lengths,
            rows.kv_lengths,
            rows.block_table,
            rows.max_query_length,
            rows.max_kv_length,
            scale,
            *how,
            prefixes=rows.prefixes,
        )
        # Layers differ in the values only.
        shapes = q_content.shape, q_rope.shape, q_content.dtype, cache.dtype
        table = rows.tables.get(
            ("paged schedule", self.name, shapes, how),
            lambda: operators.paged_schedule(call, self.name),
        )
        return operators.paged_attention_forward(*call, self.name, *table)


def training_request(request: PagedRequest) -> AttentionRequest:
    """The request to the training kernel that a paged kernel shares its limits with."""
    return AttentionRequest(
        form="absorbed",
        device=request.device,
        dtype=request.dtype,
        key_width=request.kv_lora_rank + request.qk_rope_head_dim,
        value_width=request.kv_lora_rank,
        masked=False,
        dropout=False,
    )


def why_not_fp8_rows(device: torch.device, fp8: bool) -> str | None:
    """Why Triton cannot read FP8 rows of a cache there, if it has to, or None."""
    if not fp8 or device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        return "latent_cache_dtype='fp8' needs compute capability 8.9 or newer"
    return None
