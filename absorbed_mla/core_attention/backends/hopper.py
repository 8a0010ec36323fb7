"""This package's Gluon kernels for Hopper (compute capability 9.0)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import DETERMINISM_REQUIRED, AttentionRequest
from absorbed_mla.core_attention.device_table import in_use, to_device
from absorbed_mla.core_attention.latent_kernels import (
    LatentKernelBackend,
    why_not_device,
    why_not_latent_kernels,
    why_not_triton_version,
)
from absorbed_mla.core_attention.masks.parts import query_parts
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.types import AttentionInputs

# Rows, heads of tokens, in a tile.
_ROWS = 64
_KV_LORA_RANKS = (128, 256, 512)
_ROPE_WIDTHS = (32, 64)
# From so many pairs of a query and a key on, times heads, in the mean span, backward stores P and
# dS: launches of a span then take less than atomics do. Infinite: only where it must.
LEAST_STORED_PAIRS: float = 2**28


class HopperBackend(LatentKernelBackend):
    """Its backward stores what all pairs of a part of the queries give, and multiplies that.

    It does so, by cuBLAS and with the same bits in every run, for long sequences, and where
    ``torch.use_deterministic_algorithms`` requires equal bits; 1 GiB is stored at most. Otherwise
    it adds with atomics.
    """

    name = "hopper"
    summary = "this package's kernels for Hopper, kv_lora_rank 128, 256 or 512"
    rates: Mapping[str, tuple[float, float]] = {"NVIDIA H200": (680.0, 600.0)}

    def why_not(self, request: AttentionRequest) -> str | None:
        """See ``AttentionBackend``."""
        c, rope = request.value_width, request.key_width - request.value_width
        on_gpu = request.device.type == "cuda"
        reason = why_not_latent_kernels(request) if on_gpu else "it needs a GPU"
        if reason is None and not (c in _KV_LORA_RANKS and rope in _ROPE_WIDTHS):
            known = f"{_KV_LORA_RANKS} and {_ROPE_WIDTHS}"
            reason = f"widths {c} (latent) and {rope} (rope) are not among {known}"
        reason = reason or why_not_device(request.device, lambda found: found == (9, 0), "9.0")
        return reason or why_not_triton_version(below=(3, 8))

    def query_tile_size(self, inputs: AttentionInputs) -> int:
        """See ``LatentKernelBackend``."""
        heads = inputs.q_content.shape[2]
        return _ROWS // min(heads & -heads, _ROWS)

    def backward_tables(
        self, inputs: AttentionInputs, spans: Spans
    ) -> tuple[Tensor, Tensor | None, int]:
        """See ``LatentKernelBackend``; with a table of parts P and dS are stored."""
        q_content = inputs.q_content
        rows = q_content.shape[1] * q_content.shape[2]
        required = torch.get_deterministic_debug_mode() == DETERMINISM_REQUIRED
        if not required and not _are_long(spans, rows):
            return super().backward_tables(inputs, spans)
        size, device = self.query_tile_size(inputs), q_content.device
        # Of P and of dS.
        pair_bytes = 2 * q_content.element_size() * rows

        def make() -> tuple[Tensor, Tensor]:
            tiles, parts = query_parts(spans, size, pair_bytes)
            return to_device(lambda: tiles, device), parts

        tiles, parts = spans.tables.get(("query parts", size, pair_bytes, device), make)
        return in_use(tiles), parts, 1


def _are_long(spans: Spans, rows: int) -> bool:
    """Whether P and dS are stored of so many rows of every token in these spans."""
    pairs = spans.tables.get("num_pairs", lambda: sum(span.num_pairs for span in spans))
    return rows * pairs >= LEAST_STORED_PAIRS * max(len(spans), 1)


ENTRY = HopperBackend()
