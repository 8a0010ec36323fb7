"""The indexer's selection by scores in FP8, by this package's Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.dsa.backend import SparseRequest
from absorbed_mla.dsa.fp8_rows import fp8_query
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.indexer_backends.triton import TritonBackend
from absorbed_mla.dsa.selection_triton import triton_select, triton_select_cached

# Columns of the least product of FP8.
_LEAST_WIDTH = 32


class TritonFp8Backend(TritonBackend):
    """As ``reference_fp8``; the kernels round a block of keys when they have loaded it."""

    name = "triton_fp8"
    summary = "as `triton`, chooses as `reference_fp8`; compute capability 8.9 or newer"
    speed = 0.4  # another result, so only by name
    invariant = None

    def why_not(self, request: SparseRequest) -> str | None:
        """See ``IndexerBackend``."""
        reason = super().why_not(request)
        if reason is not None:
            return reason
        if request.index_dim < _LEAST_WIDTH:
            return f"dsa_indexer_head_dim must be {_LEAST_WIDTH} or more, it is {request.index_dim}"
        if request.device.type == "cuda":
            capability = torch.cuda.get_device_capability(request.device)
            if capability < (8, 9):
                return f"FP8 needs compute capability 8.9, the GPU has {capability}"
        return None

    @staticmethod
    def select(
        index: IndexVectors,
        spans: Spans,
        topk: int,
        *,
        relu: bool,
        tp_group: dist.ProcessGroup | None,
    ) -> Tensor:
        """See ``IndexerBackend``."""
        query, weights = fp8_query(index.query, index.weights)
        index = index._replace(query=query, weights=weights)
        return triton_select(index, spans, topk, relu=relu, tp_group=tp_group)

    @staticmethod
    def select_cached(
        query: Tensor, weights: Tensor, cache: Tensor, rows: Any, topk: int, *, relu: bool
    ) -> Tensor:
        """See ``IndexerBackend``."""
        query, weights = fp8_query(query, weights)
        return triton_select_cached(query, weights, cache, rows, topk, relu=relu)


ENTRY = TritonFp8Backend()
